from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latepix.errors import ConfigError, PlaceholderMismatch
from latepix.orchestrator.batch import prepare_batch, validate_sample
from latepix.orchestrator.samples import trace_to_samples
from latepix.trace.graph import MessageNode, Trace
from latepix.trace.refs import MMRefs
from latepix.trace.training import Batch, TrainingSample, decode_batch, encode_batch
from tests.tiny.pictures import make_image
from tests.tiny.traces import make_info, make_reply_node, make_sample, make_trace, make_user_node

A, B = make_image(seed=1), make_image(width=64, seed=2)
INFO = make_info()


# --- validation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", [(), (A,), (B, A, B)])
def test_a_good_sample_is_valid(images: tuple[object, ...]) -> None:
    validate_sample(make_sample(images=images), INFO)  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize("field", ["loss_mask", "inference_logprobs", "advantages"])
def test_an_array_of_another_length_is_named(field: str) -> None:
    sample = make_sample(trace_id="s1-g2-r3")
    shorter = msgspec.structs.replace(sample, **{field: getattr(sample, field)[1:]})
    with pytest.raises(
        PlaceholderMismatch, match=r"^trace s1-g2-r3, branch 0: 5 tokens, but arrays of \[4, 5\] values"
    ):
        validate_sample(shorter, INFO)


def test_a_picture_of_another_length_is_named_with_both_numbers() -> None:
    sample = make_sample(images=(A, B))
    wrong = msgspec.structs.replace(sample, mm_refs=MMRefs.from_slots([(A, 0, 2), (B, 2, 1)]))
    with pytest.raises(PlaceholderMismatch, match=r"slot 0: a picture of 32 x 32 needs 1 tokens, the server placed 2"):
        validate_sample(wrong, INFO)


def test_a_placeholder_without_a_picture_is_refused() -> None:
    sample = msgspec.structs.replace(make_sample(images=(A, B)), mm_refs=MMRefs.from_slots([(A, 0, 1)]))
    with pytest.raises(PlaceholderMismatch, match="3 image placeholder tokens, but the 1 ranges cover 1"):
        validate_sample(sample, INFO)


def test_a_picture_over_text_is_refused() -> None:
    sample = msgspec.structs.replace(make_sample(images=(A,)), mm_refs=MMRefs.from_slots([(A, 1, 1)]))
    with pytest.raises(PlaceholderMismatch, match="slot 0"):
        validate_sample(sample, INFO)


# --- packing -----------------------------------------------------------------------------------------------------


def members(batch: Batch) -> list[list[str]]:
    return [list(micro_batch.trace_ids) for micro_batch in batch.micro_batches]


def test_samples_fill_as_few_micro_batches_as_fit() -> None:
    samples = [
        make_sample(num_text=num_text, num_sampled=1, group_id=index) for index, num_text in enumerate((5, 3, 2, 4))
    ]
    batch = prepare_batch(samples, step=2, micro_batch_tokens=9)
    assert sorted(len(micro_batch.token_ids) for micro_batch in batch.micro_batches) == [9, 9]
    assert (batch.step, batch.num_samples, batch.num_loss_tokens) == (2, 4, 4)


def test_siblings_stay_together_so_that_a_shared_picture_is_sent_once() -> None:
    pictures = [make_image(seed=seed) for seed in range(4)]
    samples = [
        make_sample(images=(pictures[group],), group_id=group, trace_id=f"g{group}-r{rollout}")
        for rollout in range(3)
        for group in range(4)
    ]
    batch = prepare_batch(samples, step=0, micro_batch_tokens=40)
    assert sum(len(micro_batch.mm_refs.images) for micro_batch in batch.micro_batches) == 4
    assert sorted(Counter(name[:2] for name in names).most_common(1)[0][1] for names in members(batch)) == [3, 3]


def test_a_group_that_is_too_large_is_split() -> None:
    samples = [make_sample(trace_id=str(index)) for index in range(5)]
    batch = prepare_batch(samples, step=0, micro_batch_tokens=10)
    assert sorted(len(names) for names in members(batch)) == [1, 2, 2]


def test_a_sample_as_long_as_the_limit_gets_a_micro_batch_of_its_own() -> None:
    samples = [
        make_sample(num_text=8, num_sampled=2, trace_id="long"),
        make_sample(num_text=0, num_sampled=1, group_id=1),
    ]
    assert ["long"] in members(prepare_batch(samples, step=0, micro_batch_tokens=10))


def test_the_same_samples_give_the_same_batch() -> None:
    samples = [make_sample(images=(A,) * (index % 3), num_text=index, group_id=index // 2) for index in range(12)]
    first, second = (encode_batch(prepare_batch(samples, step=0, micro_batch_tokens=30)) for _ in range(2))
    assert first == second


# --- from traces to the trainer, at random -----------------------------------------------------------------------

#: A few pictures, some alike in size; drawn pictures repeat, within a sample and between samples.
POOL = [
    make_image(width=32 * wide, height=32 * high, seed=seed)
    for seed, (wide, high) in enumerate([(1, 1), (1, 1), (2, 1), (3, 2), (4, 3)])
]


@st.composite
def random_traces(draw: st.DrawFn) -> list[Trace]:
    """Draw conversations of several turns with pictures, some of which branch; a few groups."""
    traces = []
    for number in range(draw(st.integers(1, 6))):
        nodes: list[MessageNode] = []
        leaf: int | None = None
        for _ in range(draw(st.integers(1, 4))):
            # A new turn hangs below the last one, or starts a branch: at a turn before, or at the root.
            answers = [index for index, node in enumerate(nodes) if node.logprobs]
            if nodes and draw(st.booleans()):
                leaf = draw(st.sampled_from([None, *answers]))
            images = draw(st.lists(st.sampled_from(POOL), max_size=3))
            text_ids = draw(st.lists(st.integers(11, 50), max_size=5))
            nodes.append(make_user_node(parent=leaf, images=images, text_ids=text_ids))
            sampled_ids = draw(st.lists(st.integers(11, 50), min_size=1, max_size=6))
            logprobs = draw(st.lists(st.floats(-20, 0, width=32), min_size=len(sampled_ids), max_size=len(sampled_ids)))
            version = draw(st.integers(0, 3))
            nodes.append(
                make_reply_node(
                    parent=len(nodes) - 1, sampled_ids=sampled_ids, logprobs=logprobs, policy_version=version
                )
            )
            leaf = len(nodes) - 1
        traces.append(
            make_trace(
                nodes=nodes,
                trace_id=f"t{number}",
                group_id=draw(st.integers(0, 2)),
                advantage=draw(st.floats(-2, 2, width=32)),
            )
        )
    return traces


def unpack(batch: Batch) -> list[TrainingSample]:
    """Cut a batch back into its samples."""
    samples = []
    for micro_batch in batch.micro_batches:
        for index, (start, length) in enumerate(
            zip(micro_batch.sample_starts.tolist(), micro_batch.sample_lengths.tolist(), strict=True)
        ):
            inside = slice(start, start + length)
            slots = [slot for slot in micro_batch.mm_refs.slots(-start) if 0 <= slot[1] < length]
            samples.append(
                TrainingSample(
                    token_ids=micro_batch.token_ids[inside],
                    loss_mask=micro_batch.loss_mask[inside],
                    inference_logprobs=micro_batch.inference_logprobs[inside],
                    advantages=micro_batch.advantages[inside],
                    mm_refs=MMRefs.from_slots(slots),
                    temperature=float(micro_batch.temperatures[index]),
                    trace_id=micro_batch.trace_ids[index],
                    policy_version=int(micro_batch.policy_versions[index]),
                )
            )
    return samples


def content(sample: TrainingSample) -> tuple[object, ...]:
    """Everything of a sample that the trainer reads, comparable."""
    return (
        sample.trace_id,
        sample.token_ids.tolist(),
        sample.loss_mask.tolist(),
        sample.inference_logprobs.tolist(),
        sample.advantages.tolist(),
        sample.mm_refs,
        sample.temperature,
        sample.policy_version,
    )


@settings(max_examples=150, deadline=None)
@given(traces=random_traces(), room=st.integers(0, 120))
def test_nothing_of_a_sample_changes_on_its_way_to_the_trainer(traces: list[Trace], room: int) -> None:
    samples = [sample for trace in traces for sample in trace_to_samples(trace, temperature=0.5)]
    for sample in samples:
        validate_sample(sample, INFO)
    limit = max(sample.num_tokens for sample in samples) + room
    batch = prepare_batch(samples, step=0, micro_batch_tokens=limit)
    arrived = decode_batch(encode_batch(batch))

    # Every sample is in exactly one micro batch, with its tokens, masks, advantages, ranges and pictures.
    assert sorted(map(repr, map(content, unpack(arrived)))) == sorted(map(repr, map(content, samples)))
    assert arrived.num_samples == len(samples)
    assert arrived.num_loss_tokens == sum(int(sample.loss_mask.sum()) for sample in samples)
    for micro_batch in arrived.micro_batches:
        assert 1 <= len(micro_batch.token_ids) <= limit
        assert micro_batch.sample_lengths.sum() == len(micro_batch.token_ids)
        micro_batch.mm_refs.validate(micro_batch.token_ids, INFO.placeholder_ids, where="micro batch")
        hashes = [image.sha256 for image in micro_batch.mm_refs.images]
        assert len(hashes) == len(set(hashes))


@settings(max_examples=150, deadline=None)
@given(traces=random_traces())
def test_each_sampled_node_is_trained_exactly_once(traces: list[Trace]) -> None:
    for trace in traces:
        num_trained = Counter[int]()
        samples = {sample.branch: sample for sample in trace_to_samples(trace)}
        for number, branch in enumerate(trace.branches):
            sample = samples.get(number)
            for start, index, node in zip(branch.node_starts, branch.node_indices, branch.nodes, strict=False):
                trained = sample is not None and sample.loss_mask[start : start + len(node.token_ids)]
                if np.any(trained):
                    # A node is trained as a whole: exactly its sampled tokens.
                    assert np.asarray(trained).tolist() == list(node.mask)
                    num_trained[index] += 1
        assert num_trained == {index: 1 for index, node in enumerate(trace.nodes) if any(node.mask)}


@settings(max_examples=150, deadline=None)
@given(traces=random_traces())
def test_equal_pictures_keep_their_slots(traces: list[Trace]) -> None:
    for trace in traces:
        for branch in trace.branches:
            refs = branch.mm_refs
            assert len(refs.refs) == sum(len(node.ranges) for node in branch.nodes)
            assert len(refs.images) == len({image.sha256 for image, _, _ in refs.slots()})


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 4)), min_size=1, max_size=40),
    limit=st.integers(20, 60),
)
def test_no_two_micro_batches_could_be_one(lengths: list[tuple[int, int]], limit: int) -> None:
    samples = [
        make_sample(num_text=length - 1, num_sampled=1, group_id=group, trace_id=str(index))
        for index, (length, group) in enumerate(lengths)
    ]
    batch = prepare_batch(samples, step=0, micro_batch_tokens=limit)
    assert sorted(int(name) for names in members(batch) for name in names) == list(range(len(samples)))
    sizes = sorted(len(micro_batch.token_ids) for micro_batch in batch.micro_batches)
    assert sizes[-1] <= limit
    assert len(sizes) == 1 or sizes[0] + sizes[1] > limit


def test_a_sample_longer_than_a_micro_batch_is_named() -> None:
    sample = make_sample(trace_id="s1-g2-r3")
    with pytest.raises(ConfigError, match=r"trace s1-g2-r3, branch 0 has 5 tokens, a micro batch takes 4"):
        prepare_batch([sample], step=0, micro_batch_tokens=4)
