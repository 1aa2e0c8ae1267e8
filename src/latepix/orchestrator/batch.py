"""Samples -> one batch of micro batches. Pure: the same samples always give the same batch."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from latepix.errors import ConfigError, PlaceholderMismatch
from latepix.families.model_info import ModelInfo
from latepix.trace.training import Batch, TrainingSample, pack_samples


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


def prepare_batch(samples: Sequence[TrainingSample], *, step: int, micro_batch_tokens: int) -> Batch:
    """Pack samples into as few micro batches as fit.

    Best-fit decreasing over groups: siblings stay together while they fit, so that a picture they share is sent,
    processed and encoded once.

    Args:
        samples: at least one, none longer than `micro_batch_tokens`.
        step: the optimizer step.
        micro_batch_tokens: most tokens in one micro batch.
    Returns:
        The batch; every sample is in exactly one micro batch, its tokens, masks and pictures unchanged.
    Raises:
        ConfigError: a sample is longer than a micro batch; names its trace.
    """
    for sample in samples:
        if sample.num_tokens > micro_batch_tokens:
            raise ConfigError(
                f"micro_batch_tokens: trace {sample.trace_id}, branch {sample.branch} has {sample.num_tokens} tokens, "
                f"a micro batch takes {micro_batch_tokens}. Raise it, or leave the sample out."
            )
    bins = _pack([sample.num_tokens for sample in samples], [sample.group_id for sample in samples], micro_batch_tokens)
    return Batch(
        step=step,
        micro_batches=tuple(pack_samples(samples[index] for index in sorted(members)) for members in bins),
        num_loss_tokens=int(sum(sample.loss_mask.sum() for sample in samples)),
        num_samples=len(samples),
    )


def _pack(lengths: Sequence[int], groups: Sequence[int], capacity: int) -> list[list[int]]:
    """Return bins of sample indices; no bin holds more than `capacity` tokens."""
    units: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        units.setdefault(group, []).append(index)
    pieces: list[tuple[int, list[int]]] = []
    for members in units.values():
        total = sum(lengths[index] for index in members)
        if total <= capacity:
            pieces.append((total, members))
        else:
            pieces.extend((lengths[index], [index]) for index in members)
    pieces.sort(key=lambda piece: -piece[0])
    bins: list[list[int]] = []
    # Free room of every bin, ascending: the first one that is large enough is the best fit.
    free: list[tuple[int, int]] = []
    for total, members in pieces:
        at = bisect.bisect_left(free, (total, -1))
        if at == len(free):
            bins.append(list(members))
            bisect.insort(free, (capacity - total, len(bins) - 1))
        else:
            room, number = free.pop(at)
            bins[number].extend(members)
            bisect.insort(free, (room - total, number))
    return bins
