"""Invariants 1-4 of the design over random traces, truncation points, bins and ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from latepix.orchestrator.batch import prepare_batch, truncate_sample, validate_sample
from latepix.orchestrator.samples import trace_to_samples
from latepix.trace.graph import Trace
from latepix.trace.training import TrainingSample, decode_batch, encode_batch
from tests.tiny.strategies import NUM_CASES, content, random_traces, unpack
from tests.tiny.traces import make_info

INFO = make_info()


def samples_of(traces: list[Trace]) -> list[TrainingSample]:
    return [sample for trace in traces for sample in trace_to_samples(trace)]


def check_truncation(whole: TrainingSample, seq_len: int) -> TrainingSample | None:
    cut = truncate_sample(whole, seq_len)
    if cut is None:
        # Only a sample whose trained tokens all lie behind the cut, or behind a picture that was cut, is dropped.
        first = int(np.flatnonzero(whole.loss_mask)[0])
        starts = [ref.offset for ref in whole.mm_refs.refs if ref.offset < seq_len < ref.offset + ref.length]
        assert min([seq_len, *starts]) <= first
        return None
    end = cut.num_tokens
    assert end <= seq_len
    assert cut.token_ids.tolist() == whole.token_ids[:end].tolist()
    assert cut.mm_refs.slots() == whole.mm_refs.slots()[: len(cut.mm_refs.refs)]
    # Nothing that would have fitted was left out: the cut is at the limit, or where a picture does not fit.
    if end < min(seq_len, whole.num_tokens):
        (ref,) = [ref for ref in whole.mm_refs.refs if ref.offset == end]
        assert ref.offset + ref.length > seq_len
    validate_sample(cut, INFO)
    return cut


@settings(max_examples=NUM_CASES, deadline=None)
@given(
    traces=random_traces(),
    seq_len=st.integers(1, 90),
    room=st.integers(0, 120),
    image_tokens=st.none() | st.integers(1, 40),
    num_ranks=st.integers(1, 5),
)
def test_nothing_is_lost_or_changed_between_traces_and_ranks(
    traces: list[Trace], seq_len: int, room: int, image_tokens: int | None, num_ranks: int
) -> None:
    kept = [cut for sample in samples_of(traces) if (cut := check_truncation(sample, seq_len)) is not None]
    limit = max([sample.num_tokens for sample in kept], default=1) + room
    batches = prepare_batch(
        kept, step=0, micro_batch_tokens=limit, micro_batch_image_tokens=image_tokens, num_ranks=num_ranks
    )
    arrived = [decode_batch(encode_batch(batch)) for batch in batches]
    group_of = {trace.id: trace.group_id for trace in traces}

    assert len(arrived) == num_ranks
    assert len({len(batch.micro_batches) for batch in arrived}) == 1
    everything = [sample for batch in arrived for sample in unpack(batch)]
    trained = [sample for sample in everything if sample.trace_id != "padding"]
    padding = [sample for sample in everything if sample.trace_id == "padding"]
    assert sorted(map(repr, map(content, trained))) == sorted(map(repr, map(content, kept)))
    assert not any(sample.loss_mask.any() or sample.advantages.any() for sample in padding)
    assert {batch.num_loss_tokens for batch in arrived} == {sum(int(sample.loss_mask.sum()) for sample in kept)}
    assert sum(batch.num_samples for batch in arrived) == len(kept)
    for batch in arrived:
        for micro_batch in batch.micro_batches:
            assert 1 <= len(micro_batch.token_ids) <= limit
            micro_batch.mm_refs.validate(micro_batch.token_ids, INFO.placeholder_ids, where="micro batch")
            sizes = {ref.image: ref.length for ref in micro_batch.mm_refs.refs}
            # Only siblings that fit by their tokens may exceed the pictures' limit, alone.
            num_groups = len({group_of.get(name) for name in micro_batch.trace_ids})
            assert image_tokens is None or sum(sizes.values()) <= image_tokens or num_groups == 1


@settings(max_examples=NUM_CASES, deadline=None)
@given(traces=random_traces(), num_ranks=st.integers(2, 5))
def test_where_one_rank_has_pictures_so_have_the_others(traces: list[Trace], num_ranks: int) -> None:
    samples = samples_of(traces)
    limit = max(sample.num_tokens for sample in samples)
    batches = prepare_batch(samples, step=0, micro_batch_tokens=limit, num_ranks=num_ranks)
    for place in zip(*(batch.micro_batches for batch in batches), strict=True):
        padding = [bool(one.mm_refs.refs) for one in place if one.trace_ids == ("padding",)]
        wanted = any(one.mm_refs.refs for one in place if one.trace_ids != ("padding",))
        exists = any(bool(sample.mm_refs.refs) == wanted for sample in samples)
        assert all(has == wanted for has in padding) or not exists
