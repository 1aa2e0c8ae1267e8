"""Samples -> one batch of micro batches for every rank. Pure: the same samples always give the same batches.

What holds (and is tested on thousands of random cases): every kept sample is in exactly one micro batch, with its
tokens, masks, advantages and pictures unchanged; a picture is kept whole or dropped whole; no micro batch holds more
tokens than allowed; every rank gets the same number of micro batches.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from latepix.errors import ConfigError, PlaceholderMismatch
from latepix.families.model_info import ModelInfo
from latepix.trace.refs import MMRefs
from latepix.trace.training import Batch, MicroBatch, TrainingSample, pack_samples


def validate_sample(sample: TrainingSample, info: ModelInfo) -> None:
    """Check that a sample's arrays, ranges and pictures fit each other and the model.

    Raises:
        PlaceholderMismatch: names the trace, the slot and both numbers.
    """
    where = f"trace {sample.trace_id}, branch {sample.branch}"
    lengths = {len(sample.loss_mask), len(sample.inference_logprobs), len(sample.advantages)}
    if lengths != {sample.num_tokens}:
        raise PlaceholderMismatch(f"{where}: {sample.num_tokens} tokens, but arrays of {sorted(lengths)} values.")
    sample.mm_refs.validate(sample.token_ids, info.placeholder_ids, where=where)
    for slot, ref in enumerate(sample.mm_refs.refs):
        image = sample.mm_refs.images[ref.image]
        expected = info.num_image_tokens(image)
        if expected != ref.length:
            raise PlaceholderMismatch(
                f"{where}, slot {slot}: a picture of {image.width} x {image.height} needs {expected} tokens, the "
                f"server placed {ref.length}. Server and trainer use different processor settings."
            )


def truncate_sample(sample: TrainingSample, seq_len: int) -> TrainingSample | None:
    """Cut a sample to a length without cutting a picture.

    A picture that does not fit is dropped whole, with everything after it.

    Worked example: 3 text tokens, a picture of 4, 2 trained tokens. `seq_len` 9 keeps all; 8 drops the last token; 7
    leaves nothing to train, so the sample is dropped; at 6 the picture would be cut, so the 3 text tokens would remain.

    Args:
        sample: T tokens.
        seq_len: most tokens that remain, at least 1.
    Returns:
        The sample itself if it fits, a shorter one, or None if no trained token remains.
    """
    if sample.num_tokens <= seq_len:
        return sample if sample.loss_mask.any() else None
    end = seq_len
    for ref in sample.mm_refs.refs:
        if ref.offset < end < ref.offset + ref.length:
            end = ref.offset
    if not sample.loss_mask[:end].any():
        return None
    return msgspec.structs.replace(
        sample,
        token_ids=sample.token_ids[:end],
        loss_mask=sample.loss_mask[:end],
        inference_logprobs=sample.inference_logprobs[:end],
        advantages=sample.advantages[:end],
        mm_refs=MMRefs.from_slots(slot for slot in sample.mm_refs.slots() if slot[1] < end),
    )


def prepare_batch(
    samples: Sequence[TrainingSample],
    *,
    step: int,
    micro_batch_tokens: int,
    micro_batch_image_tokens: int | None = None,
    num_ranks: int = 1,
) -> tuple[Batch, ...]:
    """Pack samples into as few micro batches as fit, and spread them over ranks.

    Best-fit decreasing over groups: siblings stay together while they fit, so that a picture they share is sent,
    processed and encoded once. Ranks are balanced by tokens and by the pictures that must be encoded; short ranks are
    filled up with micro batches that train nothing.

    Args:
        samples: none longer than `micro_batch_tokens`.
        step: the optimizer step.
        micro_batch_tokens: most tokens in one micro batch.
        micro_batch_image_tokens: most tokens of distinct pictures in one micro batch, a measure of the vision tower's
            work (a token is merge x merge patches); a single group or sample above it gets a micro batch of its own.
            None: no limit.
        num_ranks: trainer ranks.
    Returns:
        One batch per rank. `num_loss_tokens` is the same in all of them, the sum over ranks.
    Raises:
        ConfigError: a sample is longer than a micro batch; names its trace.
    """
    for sample in samples:
        if sample.num_tokens > micro_batch_tokens:
            raise ConfigError(
                f"micro_batch_tokens: trace {sample.trace_id}, branch {sample.branch} has {sample.num_tokens} tokens, "
                f"a micro batch takes {micro_batch_tokens}. Raise it, or leave the sample out."
            )
    pieces = _pieces(samples, micro_batch_tokens)
    bins = _pack(pieces, micro_batch_tokens, math.inf if micro_batch_image_tokens is None else micro_batch_image_tokens)
    micro_batches = [pack_samples(samples[index] for index in sorted(members)) for members in bins]
    num_loss_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    return tuple(
        Batch(
            step=step,
            micro_batches=tuple(own),
            num_loss_tokens=num_loss_tokens,
            num_samples=sum(one.num_samples for one in own if one.loss_mask.any()),
        )
        for own in _spread(micro_batches, samples, num_ranks)
    )


class _Piece(msgspec.Struct, frozen=True):
    """Samples that go into a bin together."""

    num_tokens: int
    image_tokens: int
    members: list[int]


def _pieces(samples: Sequence[TrainingSample], capacity: int) -> list[_Piece]:
    """Return whole groups where they fit into a bin, else their samples one by one; largest first."""
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    pieces: list[_Piece] = []
    for members in groups.values():
        total = sum(samples[index].num_tokens for index in members)
        for together in [members] if total <= capacity else [[index] for index in members]:
            images: dict[str, int] = {}
            for index in together:
                refs = samples[index].mm_refs
                images |= {refs.images[ref.image].sha256: ref.length for ref in refs.refs}
            num_tokens = sum(samples[index].num_tokens for index in together)
            pieces.append(_Piece(num_tokens, sum(images.values()), together))
    return sorted(pieces, key=lambda piece: -piece.num_tokens)


def _pack(pieces: Sequence[_Piece], capacity: int, image_capacity: float) -> list[list[int]]:
    """Return bins of sample indices."""
    bins: list[list[int]] = []
    image_room: list[float] = []
    # Free room of every bin, ascending: the first one that is large enough is the best fit.
    free: list[tuple[int, int]] = []
    for piece in pieces:
        at = bisect.bisect_left(free, (piece.num_tokens, -1))
        while at < len(free) and piece.image_tokens > image_room[free[at][1]]:
            at += 1
        if at == len(free):
            bins.append(list(piece.members))
            image_room.append(image_capacity - piece.image_tokens)
            bisect.insort(free, (capacity - piece.num_tokens, len(bins) - 1))
        else:
            room, number = free.pop(at)
            bins[number].extend(piece.members)
            image_room[number] -= piece.image_tokens
            bisect.insort(free, (room - piece.num_tokens, number))
    return bins


def _spread(
    micro_batches: Sequence[MicroBatch], samples: Sequence[TrainingSample], num_ranks: int
) -> list[list[MicroBatch]]:
    """Give every rank the same number of micro batches: the dearest first, each to the rank with the least work."""
    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    work = [0.0] * num_ranks
    rounds = -(-len(micro_batches) // num_ranks)
    for micro_batch in sorted(micro_batches, key=_work, reverse=True):
        rank = min((r for r in range(num_ranks) if len(ranks[r]) < rounds), key=lambda r: work[r])
        ranks[rank].append(micro_batch)
        work[rank] += _work(micro_batch)
    for place in range(rounds):
        row = [own[place] for own in ranks if place < len(own)]
        has_images = any(one.mm_refs.refs for one in row)
        for own in ranks:
            if place == len(own):
                own.append(_padding(samples, has_images=has_images))
    return ranks


def _work(micro_batch: MicroBatch) -> float:
    """Return what a micro batch costs, in tokens; a picture's tokens cost once more where they are encoded."""
    lengths = {ref.image: ref.length for ref in micro_batch.mm_refs.refs}
    return len(micro_batch.token_ids) + sum(lengths.values())


def _padding(samples: Sequence[TrainingSample], *, has_images: bool) -> MicroBatch:
    """Return the cheapest micro batch that trains nothing, with a picture if the other ranks have one."""
    alike = [sample for sample in samples if bool(sample.mm_refs.refs) == has_images] or samples
    shortest = min(alike, key=lambda sample: sample.num_tokens)
    nothing = msgspec.structs.replace(
        shortest,
        loss_mask=np.zeros_like(shortest.loss_mask),
        inference_logprobs=np.zeros_like(shortest.inference_logprobs),
        advantages=np.zeros_like(shortest.advantages),
        trace_id="padding",
    )
    return pack_samples([nothing])
