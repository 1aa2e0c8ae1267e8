from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latepix.errors import SchemaMismatch
from latepix.trace.training import Batch, MicroBatch, decode_batch, encode_batch, pack_samples
from tests.golden.rebuild_wire import DIGEST_FILE, make_fixed_batch
from tests.tiny.pictures import make_image
from tests.tiny.traces import make_sample

A, B = make_image(seed=1), make_image(width=64, seed=2)


def make_batch(*, wire_version: int = 1) -> Batch:
    first = make_sample(images=(A, B, A), trace_id="s0-g0-r0", policy_version=3)
    second = make_sample(num_text=2, num_sampled=1, trace_id="s0-g0-r1", temperature=0.5, advantage=-1.0)
    micro_batches = (pack_samples([first, second]), pack_samples([second]))
    return Batch(step=5, micro_batches=micro_batches, num_loss_tokens=4, num_samples=3, wire_version=wire_version)


def assert_same(one: MicroBatch, other: MicroBatch) -> None:
    for field in MicroBatch.__struct_fields__:
        first, second = getattr(one, field), getattr(other, field)
        if isinstance(first, np.ndarray):
            assert first.dtype == second.dtype, field
            np.testing.assert_array_equal(first, second, err_msg=field)
        else:
            assert first == second, field


def test_packing_lays_samples_end_to_end() -> None:
    packed = make_batch().micro_batches[0]
    assert packed.sample_lengths.tolist() == [9, 3]
    assert packed.sample_starts.tolist() == [0, 9]
    assert packed.num_samples == 2
    assert packed.mm_token_type_ids.tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]


def test_packing_shifts_ranges_and_merges_picture_tables() -> None:
    packed = pack_samples([make_sample(images=(A, B)), make_sample(images=(B, A))])
    assert packed.mm_refs.images == (A, B)
    assert packed.mm_refs.slots() == [(A, 0, 1), (B, 1, 2), (B, 8, 2), (A, 10, 1)]


def test_a_batch_survives_the_wire() -> None:
    batch = make_batch()
    again = decode_batch(encode_batch(batch))
    assert (again.step, again.num_loss_tokens, again.num_samples) == (5, 4, 3)
    for one, other in zip(batch.micro_batches, again.micro_batches, strict=True):
        assert_same(one, other)


def test_an_empty_batch_survives_the_wire() -> None:
    batch = Batch(step=0, micro_batches=(), num_loss_tokens=0, num_samples=0)
    assert decode_batch(encode_batch(batch)) == batch


def test_empty_arrays_survive_the_wire() -> None:
    packed = pack_samples([make_sample(num_text=0, num_sampled=0)])
    again = decode_batch(encode_batch(Batch(step=0, micro_batches=(packed,), num_loss_tokens=0, num_samples=1)))
    assert_same(packed, again.micro_batches[0])


def test_arrays_that_do_not_fit_each_other_are_a_schema_mismatch() -> None:
    packed = pack_samples([make_sample()])
    damaged = msgspec.structs.replace(packed, loss_mask=packed.loss_mask[:-1])
    data = encode_batch(Batch(step=0, micro_batches=(damaged,), num_loss_tokens=2, num_samples=1))
    with pytest.raises(SchemaMismatch, match=r"micro batch 0: .* arrays of other lengths"):
        decode_batch(data)


def test_each_picture_of_a_micro_batch_is_sent_once() -> None:
    packed = pack_samples([make_sample(images=(B, B)), make_sample(images=(B,))])
    data = encode_batch(Batch(step=0, micro_batches=(packed,), num_loss_tokens=4, num_samples=2))
    assert data.count(B.data) == 1


def test_strided_arrays_are_sent_as_they_read() -> None:
    packed = pack_samples([make_sample()])
    strided = np.arange(2 * len(packed.token_ids), dtype=np.int32)[::2]
    packed = msgspec.structs.replace(packed, token_ids=strided)
    again = decode_batch(encode_batch(Batch(step=0, micro_batches=(packed,), num_loss_tokens=2, num_samples=1)))
    assert again.micro_batches[0].token_ids.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    "array", [np.zeros(5, dtype=np.int64), np.zeros((5, 1), dtype=np.int32), np.asarray(["a"] * 5)]
)
def test_other_arrays_are_not_sent(array: np.ndarray) -> None:
    packed = msgspec.structs.replace(pack_samples([make_sample()]), token_ids=array)
    with pytest.raises(NotImplementedError, match="ndarray"):
        encode_batch(Batch(step=0, micro_batches=(packed,), num_loss_tokens=2, num_samples=1))


def test_decoded_arrays_are_read_only() -> None:
    packed = decode_batch(encode_batch(make_batch())).micro_batches[0]
    for field in ("token_ids", "loss_mask", "inference_logprobs", "advantages", "sample_lengths"):
        array = getattr(packed, field)
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_another_wire_version_is_named() -> None:
    with pytest.raises(SchemaMismatch, match=r"^step_5 has wire version 2, this trainer reads 1"):
        decode_batch(encode_batch(make_batch(wire_version=2)), where="step_5")


@pytest.mark.parametrize("data", [b"", b"\xc1", b"garbage", b"\x80", b"\x93\x01\x02\x03"])
def test_garbage_is_named(data: bytes) -> None:
    with pytest.raises(SchemaMismatch, match=rf"^step_5 \({len(data)} bytes\) is not a batch of wire version 1"):
        decode_batch(data, where="step_5")


DATA = encode_batch(make_batch())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(DATA) - 1))
def test_a_cut_off_batch_is_refused(length: int) -> None:
    with pytest.raises(SchemaMismatch):
        decode_batch(DATA[:length])


@pytest.mark.parametrize(
    "wire",
    [["<i8", b"\0" * 8], ["<i4", b"\0" * 3], ["<i4", "text"], ["<i4"], [["<i4"], b""], [None, b""], "<i4", 7, None, {}],
)
def test_an_array_of_another_kind_is_refused(wire: Any) -> None:
    plain = msgspec.msgpack.decode(DATA)
    plain["micro_batches"][0]["token_ids"] = wire
    with pytest.raises(SchemaMismatch):
        decode_batch(msgspec.msgpack.encode(plain))


def test_the_wire_bytes_are_pinned() -> None:
    # A change of these bytes needs a new WIRE_VERSION; then run the command at the top of tests/golden/rebuild_wire.py.
    digest = hashlib.sha256(encode_batch(make_fixed_batch())).hexdigest()
    assert digest == Path(DIGEST_FILE).read_text(encoding="utf-8").split()[0]
