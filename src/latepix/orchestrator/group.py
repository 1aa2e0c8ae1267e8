"""Siblings of one prompt: advantages, failures set aside, counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from latepix.config.schema import AdvantageType
from latepix.errors import RolloutError
from latepix.orchestrator.advantage import group_advantages
from latepix.trace.graph import Trace


class ScoredGroup(msgspec.Struct, frozen=True):
    """A group after scoring.

    Attributes:
        traces: the rollouts that succeeded, with their advantage.
        failed: the rollouts that failed.
        is_zero_spread: all rewards are equal, so no policy gradient.
    """

    traces: tuple[Trace, ...]
    failed: tuple[Trace, ...]
    is_zero_spread: bool


def score_group(traces: Sequence[Trace], *, kind: AdvantageType) -> ScoredGroup:
    """Give the rollouts of a group their advantages.

    Advantages are relative to the siblings that succeeded; a lone survivor has nothing to be compared with and gets 0.
    """
    succeeded = [trace for trace in traces if trace.failure is None]
    rewards = [float(trace.reward or 0.0) for trace in succeeded]
    advantages = group_advantages(rewards, kind=kind)
    return ScoredGroup(
        traces=tuple(
            msgspec.structs.replace(trace, advantage=advantage)
            for trace, advantage in zip(succeeded, advantages, strict=True)
        ),
        failed=tuple(trace for trace in traces if trace.failure is not None),
        is_zero_spread=len(set(rewards)) <= 1,
    )


def check_failures(groups: Sequence[ScoredGroup], *, max_failed_frac: float, step: int) -> None:
    """Stop the run if too many rollouts of a step failed, or all of them.

    Raises:
        RolloutError: says how many, and for which reasons, with one message each.
    """
    failed = [trace for group in groups for trace in group.failed]
    total = len(failed) + sum(len(group.traces) for group in groups)
    if not failed or (len(failed) < total and len(failed) <= max_failed_frac * total):
        return
    raise RolloutError(
        f"Step {step}: {len(failed)} of {total} rollouts failed; a step may lose orchestrator.max_failed_frac = "
        f"{max_failed_frac:g} of them, and never all:\n{_reasons(failed)}\nThey are in quarantine.jsonl."
    )


def check_evaluation(traces: Sequence[Trace], *, split: str) -> None:
    """Stop if every rollout of an evaluation failed: its reward of 0 would say nothing about the policy.

    Raises:
        RolloutError: says how many, and for which reasons, with one message each.
    """
    if traces and all(trace.failure is not None for trace in traces):
        raise RolloutError(
            f"Evaluation on split {split}: all {len(traces)} rollouts failed:\n{_reasons(traces)}\nThey are in "
            "traces/ of the run folder."
        )


def _reasons(failed: Sequence[Trace]) -> str:
    counts = Counter(trace.failure.reason for trace in failed if trace.failure)
    examples = {trace.failure.reason: trace.failure.message for trace in reversed(failed) if trace.failure}
    return "\n".join(f"  {count} x {reason}, for example: {examples[reason]}" for reason, count in counts.most_common())


def reward_part_means(traces: Sequence[Trace], area: str) -> dict[str, float]:
    """Return the mean of each named part of the reward, over the rollouts that have it, as `area/reward/part/mean`."""
    names = sorted({name for trace in traces for name in trace.reward_parts})
    values = {name: [trace.reward_parts[name] for trace in traces if name in trace.reward_parts] for name in names}
    return {f"{area}/reward/{name}/mean": sum(parts) / len(parts) for name, parts in values.items()}


def rollout_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the scalars of a step's rollouts."""
    traces = [trace for group in groups for trace in group.traces]
    failed = [trace for group in groups for trace in group.failed]
    values: dict[str, float] = {
        "rollout/traces/count": len(traces) + len(failed),
        "rollout/failed/count": len(failed),
    }
    for reason, count in Counter(trace.failure.reason for trace in failed if trace.failure).items():
        values[f"rollout/failed/{reason}/count"] = count
    if not traces:
        return values
    rewards = [float(trace.reward or 0.0) for trace in traces]
    mean = sum(rewards) / len(rewards)
    sampled = [trace.num_sampled_tokens for trace in traces]
    total = [trace.num_tokens for trace in traces]
    image_tokens = sum(placed.length for trace in traces for node in trace.nodes for placed in node.ranges)
    return (
        values
        | reward_part_means(traces, "rollout")
        | {
            "rollout/reward/mean": mean,
            "rollout/reward/std": (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5,
            "rollout/zero_spread_groups/frac": sum(group.is_zero_spread for group in groups) / len(groups),
            "rollout/truncated/frac": sum(trace.is_truncated for trace in traces) / len(traces),
            "rollout/completion_tokens/mean": sum(sampled) / len(traces),
            "rollout/prompt_tokens/mean": (sum(total) - sum(sampled)) / len(traces),
            "rollout/image_tokens/sum": image_tokens,
        }
    )
