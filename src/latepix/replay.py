"""`latepix replay`: play quarantined rollouts again and show what went wrong, with the full traceback.

In: the `config.json` and `quarantine.jsonl` of a run folder. A rollout is played as it was: same task, split, seed and
temperature, on a server of its own. The weights need not be the ones that sampled then, so an error that depends on
what the policy said may stay away; one that depends on the task or its pictures comes back.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from latepix.config.loader import load_config
from latepix.config.schema import RunConfig
from latepix.environments.base import Environment, load_environment
from latepix.errors import ConfigError
from latepix.families.model_info import read_model_info
from latepix.inference.client import InferenceClient, Sampling
from latepix.inference.render import MessageRenderer
from latepix.launcher import at_server, inference_server
from latepix.orchestrator.rollout import RolloutSpec, Sampler, ServedPolicy, failure_of, play_out
from latepix.orchestrator.server import client_of
from latepix.runs import picture_door
from latepix.trace.graph import Trace
from latepix.trace.store import read_traces

#: Ids that are listed when the one that was asked for is not there.
_MAX_IDS_SHOWN = 10


class Outcome(msgspec.Struct, frozen=True):
    """How a rollout ended this time.

    Attributes:
        reason: code of the failure; None if it succeeded.
        text: for people: the traceback, or the reward.
    """

    reason: str | None
    text: str


def run_replay(
    run_dir: Path, *, trace_id: str | None = None, limit: int | None = None, model: Path | None = None
) -> int:
    """Replay the quarantined rollouts of a run and print what happens.

    Args:
        run_dir: run folder; the server's log goes to its `replay/logs`.
        trace_id: only this rollout; None means all.
        limit: only the first so many; None means all.
        model: folder of the weights; None means the run's final ones, or else those it began with.
    Returns:
        0 if every rollout failed again for the same reason (or none was quarantined), 1 if one did not.
    Raises:
        ConfigError: the folder, the id or the model is wrong.
        ProcessFailed: the server died.
        TransportError: `quarantine.jsonl` is damaged.
    """
    if not (run_dir / "config.json").is_file():
        raise ConfigError(f"{run_dir} is not a run folder: it has no config.json. Wanted the output_dir of a run.")
    quarantined = read_quarantine(run_dir)
    if not quarantined:
        print(f"nothing was quarantined in {run_dir}")
        return 0
    traces = select_traces(quarantined, trace_id=trace_id, limit=limit)
    config = load_config(RunConfig, ["@", str(run_dir / "config.json")])
    path, which = choose_model(run_dir, config, model)
    config = config.model_copy(
        update={
            "output_dir": run_dir / "replay",
            "model": config.model.model_copy(update={"path": path}),
            # The run's own port may still be in use, and the server it was attached to may serve other weights by now.
            "inference": config.inference.model_copy(update={"port": 0, "url": None}),
        }
    )
    info = read_model_info(path)
    environment = load_environment(config.environment, picture_door(config.images, info))
    print(f"model: {path} ({which})", flush=True)
    with inference_server(config) as base_url:
        client = client_of(at_server(config, base_url), info)
        outcomes = asyncio.run(_replay_all(traces, environment, client, MessageRenderer(info), config))
    print(f"\n{summary_line(traces, outcomes)}")
    return int(any(not _is_same(trace, outcome) for trace, outcome in zip(traces, outcomes, strict=True)))


def read_quarantine(run_dir: Path) -> list[Trace]:
    """Return the failed rollouts of a run in the order in which they were recorded, without their pictures.

    Raises:
        TransportError: a line is damaged.
    """
    path = run_dir / "quarantine.jsonl"
    return list(read_traces(path, with_images=False)) if path.exists() else []


def select_traces(traces: Sequence[Trace], *, trace_id: str | None, limit: int | None) -> list[Trace]:
    """Return the rollouts to replay.

    Raises:
        ConfigError: no rollout has the id, or one cannot be replayed because its task is not recorded.
    """
    selected = [trace for trace in traces if trace_id in (None, trace.id)][:limit]
    if not selected:
        ids = list(dict.fromkeys(trace.id for trace in traces))
        more = f" and {len(ids) - _MAX_IDS_SHOWN} more" if len(ids) > _MAX_IDS_SHOWN else ""
        raise ConfigError(
            f"No quarantined rollout has the id {trace_id!r}. There are {', '.join(ids[:_MAX_IDS_SHOWN])}{more}."
        )
    for trace in selected:
        if trace.task_index < 0:
            raise ConfigError(
                f"Rollout {trace.id} cannot be replayed: it was recorded without the index of its task, by an older "
                "latepix. Choose another one with --id."
            )
    return selected


def choose_model(run_dir: Path, config: RunConfig, model: Path | None) -> tuple[Path, str]:
    """Return the model folder to replay with, and in words which one it is."""
    if model is not None:
        return model, "--model"
    if (run_dir / "model").is_dir():
        return run_dir / "model", "the run's final weights"
    return config.model.path, "model.path of the run's config"


async def _replay_all(
    traces: Sequence[Trace],
    environment: Environment,
    client: InferenceClient,
    renderer: MessageRenderer,
    config: RunConfig,
) -> list[Outcome]:
    outcomes = []
    try:
        for trace in traces:
            print(f"\n{describe_recorded(trace)}", flush=True)
            outcome = await replay_trace(trace, environment, client, renderer, config)
            print(describe_outcome(trace, outcome), flush=True)
            outcomes.append(outcome)
    finally:
        await client.close()
    return outcomes


async def replay_trace(
    trace: Trace, environment: Environment, client: Sampler, renderer: MessageRenderer, config: RunConfig
) -> Outcome:
    """Play a recorded rollout again.

    Raises:
        ConfigError: the environment says that a setting is wrong; that would have ended the run, too.
    """
    try:
        task = environment.task(trace.split, trace.task_index)
        spec = RolloutSpec(
            trace_id=trace.id,
            task=task,
            split=trace.split,
            step=trace.step,
            group_id=trace.group_id,
            sampling=Sampling(temperature=trace.temperature, max_tokens=config.sampling.max_tokens, seed=trace.seed),
            task_index=trace.task_index,
        )
        policy = ServedPolicy(
            client,
            renderer,
            spec,
            max_images=config.images.max_per_prompt,
            max_model_len=renderer.info.max_len(config.inference.max_model_len),
        )
        score = await play_out(environment, policy, task, renderer.info)
    except Exception as error:
        # The rollout border, as in `play`; here people get to see all of it.
        failure = failure_of(error, f"environment {environment.name}, task {trace.task_id}")
        return Outcome(reason=failure.reason, text="".join(traceback.format_exception(error)).rstrip())
    return Outcome(reason=None, text=f"reward {float(score.reward):g}")


def describe_recorded(trace: Trace) -> str:
    """Say which rollout it is and how it failed when it was recorded."""
    failure = trace.failure
    recorded = f"{failure.reason}: {failure.message}" if failure else "no failure"
    return (
        f"rollout {trace.id}: task {trace.task_index} of split {trace.split} ({trace.task_id}), seed {trace.seed}, "
        f"temperature {trace.temperature:g}\nrecorded: {recorded}"
    )


def describe_outcome(trace: Trace, outcome: Outcome) -> str:
    """Say how a rollout ended this time, next to how it was recorded."""
    if outcome.reason is None:
        return f"now: succeeded this time, {outcome.text}"
    same = "the same reason" if _is_same(trace, outcome) else "another reason"
    return f"now: {outcome.reason} ({same})\n{outcome.text}"


def summary_line(traces: Sequence[Trace], outcomes: Sequence[Outcome]) -> str:
    """Boil a replay down to one line."""
    counts = Counter(
        "succeeded" if outcome.reason is None else _is_same(trace, outcome)
        for trace, outcome in zip(traces, outcomes, strict=True)
    )
    return (
        f"replayed {len(traces)}: {counts[True]} failed again for the same reason, {counts[False]} for another one, "
        f"{counts['succeeded']} succeeded"
    )


def _is_same(trace: Trace, outcome: Outcome) -> bool:
    return trace.failure is not None and trace.failure.reason == outcome.reason
