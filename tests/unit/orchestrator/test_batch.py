from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latepix.errors import ConfigError, PlaceholderMismatch
from latepix.orchestrator.batch import prepare_batch, truncate_sample, validate_sample
from latepix.orchestrator.samples import trace_to_samples
from latepix.trace.graph import Trace
from latepix.trace.refs import MMRefs
from latepix.trace.training import Batch, decode_batch, encode_batch
from tests.tiny.pictures import make_image
from tests.tiny.strategies import content, random_traces, unpack
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
    (batch,) = prepare_batch(samples, step=2, micro_batch_tokens=9)
    assert sorted(len(micro_batch.token_ids) for micro_batch in batch.micro_batches) == [9, 9]
    assert (batch.step, batch.num_samples, batch.num_loss_tokens) == (2, 4, 4)


def test_siblings_stay_together_so_that_a_shared_picture_is_sent_once() -> None:
    pictures = [make_image(seed=seed) for seed in range(4)]
    samples = [
        make_sample(images=(pictures[group],), group_id=group, trace_id=f"g{group}-r{rollout}")
        for rollout in range(3)
        for group in range(4)
    ]
    (batch,) = prepare_batch(samples, step=0, micro_batch_tokens=40)
    assert sum(len(micro_batch.mm_refs.images) for micro_batch in batch.micro_batches) == 4
    assert sorted(Counter(name[:2] for name in names).most_common(1)[0][1] for names in members(batch)) == [3, 3]


def test_a_group_that_is_too_large_is_split() -> None:
    samples = [make_sample(trace_id=str(index)) for index in range(5)]
    (batch,) = prepare_batch(samples, step=0, micro_batch_tokens=10)
    assert sorted(len(names) for names in members(batch)) == [1, 2, 2]


def test_a_sample_as_long_as_the_limit_gets_a_micro_batch_of_its_own() -> None:
    samples = [
        make_sample(num_text=8, num_sampled=2, trace_id="long"),
        make_sample(num_text=0, num_sampled=1, group_id=1),
    ]
    assert ["long"] in members(prepare_batch(samples, step=0, micro_batch_tokens=10)[0])


def test_the_same_samples_give_the_same_batch() -> None:
    samples = [make_sample(images=(A,) * (index % 3), num_text=index, group_id=index // 2) for index in range(12)]
    first, second = (encode_batch(prepare_batch(samples, step=0, micro_batch_tokens=30)[0]) for _ in range(2))
    assert first == second


def test_ranks_are_balanced_by_work() -> None:
    samples = [
        make_sample(num_text=size - 1, num_sampled=1, group_id=index)
        for index, size in enumerate((22, 40, 28, 36, 24, 32))
    ]
    batches = prepare_batch(samples, step=0, micro_batch_tokens=40, num_ranks=2)
    assert [[len(one.token_ids) for one in batch.micro_batches] for batch in batches] == [[40, 28, 24], [36, 32, 22]]


def test_pictures_count_as_work() -> None:
    """A picture of 12 tokens is 12 tokens in the row and 12 in the vision tower."""
    picture = make_image(width=128, height=96, seed=3)
    shown, text = make_sample(images=(picture,), num_text=0), make_sample(num_text=18, group_id=1)
    also_text = make_sample(num_text=17, group_id=2)
    first, second = prepare_batch([shown, text, also_text], step=0, micro_batch_tokens=20, num_ranks=2)
    assert [len(batch.micro_batches) for batch in (first, second)] == [2, 2]
    assert first.micro_batches[0].mm_refs.refs
    assert not second.micro_batches[0].mm_refs.refs


def test_distinct_pictures_limit_a_micro_batch() -> None:
    pictures = [make_image(width=64, height=64, seed=seed) for seed in range(4)]
    samples = [make_sample(images=(picture,), group_id=index) for index, picture in enumerate(pictures)]
    (batch,) = prepare_batch(samples, step=0, micro_batch_tokens=1000, micro_batch_image_tokens=8)
    assert [len(one.mm_refs.images) for one in batch.micro_batches] == [2, 2]


def test_a_short_rank_is_filled_up_with_work_that_trains_nothing() -> None:
    first, second = prepare_batch([make_sample(images=(A,))], step=0, micro_batch_tokens=20, num_ranks=2)
    (padding,) = second.micro_batches
    assert padding.trace_ids == ("padding",)
    assert not padding.loss_mask.any()
    assert padding.mm_refs == first.micro_batches[0].mm_refs
    assert (first.num_samples, second.num_samples) == (1, 0)
    assert first.num_loss_tokens == second.num_loss_tokens > 0


# --- truncation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seq_len", "kept"), [(9, 9), (8, 8), (7, None), (4, None)], ids=["all", "last token", "nothing trained", "picture"]
)
def test_a_picture_is_kept_whole_or_dropped_whole(seq_len: int, kept: int | None) -> None:
    picture = make_image(width=64, height=64, seed=1)
    nodes = [make_user_node(images=[picture], text_ids=(11,)), make_reply_node(parent=0, lead_ids=())]
    (sample,) = trace_to_samples(make_trace(nodes=nodes, advantage=1.0))
    assert sample.num_tokens == 9
    cut = truncate_sample(sample, seq_len)
    assert (cut.num_tokens if cut else None) == kept


def test_truncation_inside_a_later_picture_drops_it_and_everything_after() -> None:
    pictures = [make_image(width=64, height=64, seed=seed) for seed in range(2)]
    nodes = [
        make_user_node(images=[pictures[0]]),
        make_reply_node(parent=0),
        make_user_node(parent=1, images=[pictures[1]]),
        make_reply_node(parent=2),
    ]
    (sample,) = trace_to_samples(make_trace(nodes=nodes, advantage=1.0))
    second = sample.mm_refs.refs[1]
    cut = truncate_sample(sample, second.offset + second.length - 1)
    assert cut is not None
    assert cut.num_tokens == second.offset
    assert [image.sha256 for image in cut.mm_refs.images] == [pictures[0].sha256]
    validate_sample(cut, INFO)


# --- from traces to the trainer, at random -----------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(traces=random_traces(), room=st.integers(0, 120))
def test_nothing_of_a_sample_changes_on_its_way_to_the_trainer(traces: list[Trace], room: int) -> None:
    samples = [sample for trace in traces for sample in trace_to_samples(trace, temperature=0.5)]
    for sample in samples:
        validate_sample(sample, INFO)
    limit = max(sample.num_tokens for sample in samples) + room
    (batch,) = prepare_batch(samples, step=0, micro_batch_tokens=limit)
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
    (batch,) = prepare_batch(samples, step=0, micro_batch_tokens=limit)
    assert sorted(int(name) for names in members(batch) for name in names) == list(range(len(samples)))
    sizes = sorted(len(micro_batch.token_ids) for micro_batch in batch.micro_batches)
    assert sizes[-1] <= limit
    assert len(sizes) == 1 or sizes[0] + sizes[1] > limit


def test_a_sample_longer_than_a_micro_batch_is_named() -> None:
    sample = make_sample(trace_id="s1-g2-r3")
    with pytest.raises(ConfigError, match=r"trace s1-g2-r3, branch 0 has 5 tokens, a micro batch takes 4"):
        prepare_batch([sample], step=0, micro_batch_tokens=4)
