from __future__ import annotations

import msgspec
import pytest

from latepix.errors import RolloutError
from latepix.orchestrator.group import (
    ScoredGroup,
    check_evaluation,
    check_failures,
    reward_part_means,
    rollout_metrics,
    score_group,
)
from latepix.trace.graph import RolloutFailure, Trace
from tests.tiny.pictures import make_image
from tests.tiny.traces import make_reply_node, make_trace, make_user_node


def failed_trace(reason: str = "environment_raised", message: str = "boom") -> Trace:
    return make_trace(failure=RolloutFailure(reason, message))


def score(*traces: Trace) -> ScoredGroup:
    return score_group(traces, kind="dr_grpo")


def test_siblings_are_compared_with_each_other() -> None:
    group = score(make_trace(reward=1.0, trace_id="a"), make_trace(reward=0.0, trace_id="b"))
    assert [(trace.id, trace.advantage) for trace in group.traces] == [("a", 0.5), ("b", -0.5)]
    assert not group.is_zero_spread


def test_failed_rollouts_are_set_aside_and_not_compared_with() -> None:
    failed = failed_trace()
    group = score(make_trace(reward=1.0), failed, make_trace(reward=0.0))
    assert [trace.advantage for trace in group.traces] == [0.5, -0.5]
    assert group.failed == (failed,)


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (0.5,), ()])
def test_a_group_without_spread_is_marked(rewards: tuple[float, ...]) -> None:
    group = score(failed_trace(), *(make_trace(reward=reward) for reward in rewards))
    assert group.is_zero_spread
    assert [trace.advantage for trace in group.traces] == [0.0] * len(rewards)


def test_scaling_is_handed_on() -> None:
    group = score_group([make_trace(reward=3.0), make_trace(reward=1.0)], kind="grpo")
    assert [trace.advantage for trace in group.traces] == pytest.approx([1.0, -1.0], abs=1e-3)


def test_a_few_failures_are_allowed() -> None:
    group = score(*(make_trace() for _ in range(4)), failed_trace())
    check_failures([group], max_failed_frac=0.2, step=3)


def test_too_many_failures_stop_the_run_with_their_reasons() -> None:
    first = score(make_trace(), failed_trace("inference_failed", "HTTP 500"), failed_trace(message="first boom"))
    second = score(make_trace(), failed_trace(message="second boom"))
    with pytest.raises(RolloutError) as caught:
        check_failures([first, second], max_failed_frac=0.5, step=3)
    assert str(caught.value).splitlines() == [
        "Step 3: 3 of 5 rollouts failed; a step may lose orchestrator.max_failed_frac = 0.5 of them, and never all:",
        "  2 x environment_raised, for example: first boom",
        "  1 x inference_failed, for example: HTTP 500",
        "They are in quarantine.jsonl.",
    ]


def test_a_step_in_which_everything_fails_stops_the_run_at_any_limit() -> None:
    with pytest.raises(RolloutError, match="2 of 2 rollouts failed"):
        check_failures([score(failed_trace(), failed_trace())], max_failed_frac=1.0, step=0)


def test_an_evaluation_in_which_everything_fails_is_an_error() -> None:
    with pytest.raises(RolloutError) as caught:
        check_evaluation([failed_trace(message="boom"), failed_trace(message="boom")], split="test")
    assert str(caught.value).splitlines() == [
        "Evaluation on split test: all 2 rollouts failed:",
        "  2 x environment_raised, for example: boom",
        "They are in traces/ of the run folder.",
    ]


def test_an_evaluation_may_lose_rollouts() -> None:
    check_evaluation([failed_trace(), make_trace(reward=1.0)], split="test")


def test_metrics_count_what_was_played() -> None:
    image = make_image(width=64)
    long = make_trace(
        nodes=[
            make_user_node(images=(image,)),
            make_reply_node(parent=0, sampled_ids=(1, 2, 3, 4), finish_reason="length"),
        ],
        reward=0.0,
    )
    first = score(make_trace(reward=1.0), long)
    second = score(make_trace(reward=1.0), failed_trace("inference_failed"), failed_trace())
    assert rollout_metrics([first, second]) == {
        "rollout/traces/count": 5,
        "rollout/failed/count": 2,
        "rollout/failed/inference_failed/count": 1,
        "rollout/failed/environment_raised/count": 1,
        "rollout/reward/mean": pytest.approx(2 / 3),
        "rollout/reward/std": pytest.approx((2 / 9) ** 0.5),
        "rollout/reward/exact/mean": 1.0,
        "rollout/zero_spread_groups/frac": 0.5,
        "rollout/truncated/frac": pytest.approx(1 / 3),
        # Sampled 2 + 4 + 2; prompts of 3 (two text tokens, one of the generation prompt), 7 and 3 tokens.
        "rollout/completion_tokens/mean": pytest.approx(8 / 3),
        "rollout/prompt_tokens/mean": pytest.approx(13 / 3),
        "rollout/image_tokens/sum": 2,
    }


def test_metrics_of_a_step_without_survivors_count_the_failures() -> None:
    assert rollout_metrics([score(failed_trace())]) == {
        "rollout/traces/count": 1,
        "rollout/failed/count": 1,
        "rollout/failed/environment_raised/count": 1,
    }


def test_parts_of_the_reward_are_measured_by_name() -> None:
    parts: list[dict[str, float]] = [{"exact": 1.0, "style": 0.5}, {"exact": 0.0}]
    traces = [msgspec.structs.replace(make_trace(), reward_parts=own) for own in parts]
    assert reward_part_means(traces, "eval") == {"eval/reward/exact/mean": 0.5, "eval/reward/style/mean": 0.5}
