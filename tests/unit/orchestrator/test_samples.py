from __future__ import annotations

import msgspec
import numpy as np

from latepix.orchestrator.samples import trace_to_samples
from latepix.trace.graph import RolloutFailure
from tests.tiny.pictures import make_image
from tests.tiny.traces import IMAGE_ID, make_reply_node, make_trace, make_user_node

A, B = make_image(seed=1), make_image(width=64, seed=2)


def test_a_turn_becomes_one_sample() -> None:
    trace = make_trace(images=(B,), trace_id="t", group_id=4, advantage=-1.5)
    (sample,) = trace_to_samples(trace, temperature=0.7)
    assert sample.token_ids.tolist() == [5, IMAGE_ID, IMAGE_ID, 6, 11, 12, 3, 21, 7]
    assert np.flatnonzero(sample.loss_mask).tolist() == [7, 8]
    assert sample.inference_logprobs[7:].tolist() == [-0.5, -0.75]
    assert sample.advantages.tolist() == [0.0] * 7 + [-1.5] * 2
    assert sample.mm_refs.slots() == [(B, 1, 2)]
    assert (sample.trace_id, sample.branch, sample.group_id, sample.temperature) == ("t", 0, 4, 0.7)


def test_arrays_have_the_dtypes_of_the_wire() -> None:
    (sample,) = trace_to_samples(make_trace())
    dtypes = [a.dtype for a in (sample.token_ids, sample.loss_mask, sample.inference_logprobs, sample.advantages)]
    assert dtypes == [np.int32, bool, np.float32, np.float32]


def test_every_turn_of_a_conversation_is_trained_in_one_sample() -> None:
    nodes = [
        make_user_node(images=(A,)),
        make_reply_node(parent=0, policy_version=3),
        make_user_node(parent=1, images=(B, A)),
        make_reply_node(parent=2, policy_version=2),
    ]
    (sample,) = trace_to_samples(make_trace(nodes=nodes))
    assert sample.loss_mask.sum() == 4
    assert [image for image, _, _ in sample.mm_refs.slots()] == [A, B, A]
    assert sample.mm_refs.images == (A, B)
    assert sample.policy_version == 2


def test_a_shared_node_is_trained_in_the_first_branch_only() -> None:
    nodes = [
        make_user_node(),
        make_reply_node(parent=0),
        make_user_node(parent=1, text_ids=(13,)),
        make_reply_node(parent=2),
        make_user_node(parent=1, text_ids=(14,)),
        make_reply_node(parent=4),
    ]
    first, second = trace_to_samples(make_trace(nodes=nodes))
    assert np.flatnonzero(first.loss_mask).tolist() == [3, 4, 7, 8]
    assert np.flatnonzero(second.loss_mask).tolist() == [7, 8]
    # Where a token is not trained, nothing of it is sent.
    assert second.inference_logprobs[3:5].tolist() == second.advantages[3:5].tolist() == [0.0, 0.0]
    assert (first.branch, second.branch) == (0, 1)


def test_a_branch_with_nothing_left_to_train_gives_no_sample() -> None:
    nodes = [make_user_node(), make_reply_node(parent=0), make_user_node(parent=1), make_user_node(parent=1)]
    samples = trace_to_samples(make_trace(nodes=nodes))
    assert [sample.branch for sample in samples] == [0]


def test_a_trace_without_tokens_gives_no_sample() -> None:
    assert trace_to_samples(make_trace(nodes=[])) == []


def test_a_first_token_has_no_context_and_is_not_trained() -> None:
    nodes = [make_reply_node(parent=None, lead_ids=(), sampled_ids=(21, 7))]
    (sample,) = trace_to_samples(make_trace(nodes=nodes))
    assert sample.loss_mask.tolist() == [False, True]


def test_demonstrations_weigh_one() -> None:
    (sample,) = trace_to_samples(make_trace(advantage=None))
    assert sample.advantages[sample.loss_mask].tolist() == [1.0, 1.0]


def test_a_failed_rollout_gives_no_sample() -> None:
    # It has no advantage; without this rule its turns would be trained like demonstrations.
    trace = msgspec.structs.replace(make_trace(), reward=None, failure=RolloutFailure("environment_raised", "boom"))
    assert trace_to_samples(trace) == []
