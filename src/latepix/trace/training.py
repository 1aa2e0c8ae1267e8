"""What the trainer gets: samples, micro batches, batches. Tokens and references, never pixels.

`TrainingSample` is one branch, made by `orchestrator/samples.py`. `MicroBatch` is several samples laid end to end,
made by `orchestrator/batch.py`, and `Batch` is one optimizer step's data: the thing that crosses the wire as msgpack.

Worked example: samples of 3 and 2 tokens become one micro batch::

    token_ids       [11, 12, 13, 21, 22]
    sample_lengths  [3, 2]
    loss_mask       [0, 0, 1, 0, 1]     token t is trained; its logprob comes from the token before it

A refs' offset counts from the first token of the micro batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from latepix.errors import SchemaMismatch
from latepix.trace.refs import MMRefs

#: Goes up whenever the meaning or the layout of a wire type changes.
WIRE_VERSION = 1
_ARRAY_DTYPES = frozenset({"<i4", "<f4", "|b1", "|u1"})


class TrainingSample(msgspec.Struct, frozen=True):
    """One branch of one trace, ready to be trained.

    Attributes:
        token_ids: [T] int32, expanded.
        loss_mask: [T] bool, tokens to train; never the first one.
        inference_logprobs: [T] float32, nats, by the server; 0 where not trained.
        advantages: [T] float32, 0 where not trained.
        mm_refs: pictures and their ranges.
        temperature: the sampling temperature; the trainer divides its logits by it.
        trace_id, branch: where it comes from.
        group_id: siblings of one prompt share it.
        policy_version: the oldest weights that sampled one of its tokens; -1 if nothing was sampled (SFT).
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    inference_logprobs: np.ndarray
    advantages: np.ndarray
    mm_refs: MMRefs
    temperature: float = 1.0
    trace_id: str = ""
    branch: int = 0
    group_id: int = 0
    policy_version: int = -1

    @property
    def num_tokens(self) -> int:
        """Length T."""
        return len(self.token_ids)

    @property
    def mm_token_type_ids(self) -> np.ndarray:
        """[T] uint8: 1 where a picture fills the token, 0 for text."""
        return self.mm_refs.mm_token_type_ids(self.num_tokens)


class MicroBatch(msgspec.Struct, frozen=True):
    """Samples laid end to end: the data of one forward-backward.

    Attributes:
        token_ids: [T] int32.
        sample_lengths: [S] int32, sums to T.
        loss_mask, inference_logprobs, advantages: [T], as in `TrainingSample`.
        temperatures: [S] float32.
        mm_refs: one picture table for all samples; offsets count from the first token of the micro batch.
        trace_ids: [S] where the samples come from.
        policy_versions: [S] int32.
    """

    token_ids: np.ndarray
    sample_lengths: np.ndarray
    loss_mask: np.ndarray
    inference_logprobs: np.ndarray
    advantages: np.ndarray
    temperatures: np.ndarray
    mm_refs: MMRefs
    trace_ids: tuple[str, ...]
    policy_versions: np.ndarray

    @property
    def num_samples(self) -> int:
        """Number of samples S."""
        return len(self.sample_lengths)

    @property
    def sample_starts(self) -> np.ndarray:
        """[S] int64: offset of each sample's first token."""
        return np.cumsum(self.sample_lengths, dtype=np.int64) - self.sample_lengths

    @property
    def mm_token_type_ids(self) -> np.ndarray:
        """[T] uint8: 1 where a picture fills the token, 0 for text."""
        return self.mm_refs.mm_token_type_ids(len(self.token_ids))


class Batch(msgspec.Struct, frozen=True):
    """One optimizer step's data.

    Attributes:
        step: counts from 0.
        micro_batches: in the order in which they are trained.
        num_loss_tokens: trained tokens over all micro batches, the one denominator of the loss.
        num_samples: samples over all micro batches.
        wire_version: of the format.
    """

    step: int
    micro_batches: tuple[MicroBatch, ...]
    num_loss_tokens: int
    num_samples: int
    wire_version: int = WIRE_VERSION


def pack_samples(samples: Iterable[TrainingSample]) -> MicroBatch:
    """Lay samples end to end, shifting their ranges and merging their picture tables."""
    samples = list(samples)
    slots = []
    start = 0
    for sample in samples:
        slots.extend(sample.mm_refs.slots(shift=start))
        start += sample.num_tokens
    return MicroBatch(
        token_ids=np.concatenate([sample.token_ids for sample in samples]),
        sample_lengths=np.asarray([sample.num_tokens for sample in samples], dtype=np.int32),
        loss_mask=np.concatenate([sample.loss_mask for sample in samples]),
        inference_logprobs=np.concatenate([sample.inference_logprobs for sample in samples]),
        advantages=np.concatenate([sample.advantages for sample in samples]),
        temperatures=np.asarray([sample.temperature for sample in samples], dtype=np.float32),
        mm_refs=MMRefs.from_slots(slots),
        trace_ids=tuple(sample.trace_id for sample in samples),
        policy_versions=np.asarray([sample.policy_version for sample in samples], dtype=np.int32),
    )


def encode_batch(batch: Batch) -> bytes:
    """Encode a batch as msgpack; arrays are little-endian bytes with their dtype."""
    return _ENCODER.encode(batch)


def decode_batch(data: bytes, *, where: str = "batch") -> Batch:
    """Decode what `encode_batch` wrote. Arrays are read-only views of `data`.

    Raises:
        SchemaMismatch: the bytes are damaged, or of another version of the format.
    """
    try:
        batch = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise SchemaMismatch(
            f"{where} ({len(data)} bytes) is not a batch of wire version {WIRE_VERSION}: {error}. It was cut off, or "
            "written by another version of latepix."
        ) from error
    if batch.wire_version != WIRE_VERSION:
        raise SchemaMismatch(
            f"{where} has wire version {batch.wire_version}, this trainer reads {WIRE_VERSION}. Install the same "
            "latepix on both sides."
        )
    for number, micro_batch in enumerate(batch.micro_batches):
        _check_lengths(micro_batch, f"{where}, micro batch {number}")
    return batch


def _check_lengths(micro_batch: MicroBatch, where: str) -> None:
    num_tokens, num_samples = len(micro_batch.token_ids), micro_batch.num_samples
    per_token = (micro_batch.loss_mask, micro_batch.inference_logprobs, micro_batch.advantages)
    per_sample = (micro_batch.temperatures, micro_batch.policy_versions, micro_batch.trace_ids)
    if (
        any(len(array) != num_tokens for array in per_token)
        or any(len(array) != num_samples for array in per_sample)
        or int(micro_batch.sample_lengths.sum()) != num_tokens
    ):
        raise SchemaMismatch(
            f"{where}: {num_tokens} tokens in {num_samples} samples, but arrays of other lengths. It was damaged, or "
            "written by another version of latepix."
        )
    starts = micro_batch.sample_starts[micro_batch.sample_lengths > 0]
    if micro_batch.loss_mask[starts].any():
        raise SchemaMismatch(f"{where}: a sample's first token is marked as trained, but nothing predicts it.")


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.ndim == 1:
        array = np.ascontiguousarray(value)
        dtype = array.dtype.newbyteorder("<").str
        if dtype in _ARRAY_DTYPES:
            return [dtype, array.astype(dtype, copy=False).data.cast("B") if len(array) else b""]
    raise NotImplementedError(f"cannot send {type(value).__name__} over the wire")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray or not isinstance(value, list) or len(value) != 2:
        raise ValueError("expected [dtype, bytes]")
    dtype, data = value
    if dtype not in _ARRAY_DTYPES:
        raise ValueError(f"array dtype {dtype!r} is not one of {sorted(_ARRAY_DTYPES)}")
    return np.frombuffer(data, dtype=dtype)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_DECODER = msgspec.msgpack.Decoder(Batch, dec_hook=_decode_array)
