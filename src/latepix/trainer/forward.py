"""MicroBatch -> `trainer_logprobs` of the trained tokens, under the sampler's temperature and ban list.

Samples are laid out as one packed row or as rows padded on the right, whichever the family's policy allows and costs
less; both give what each sample gives alone. Positions are computed per sample from its picture ranges and grids.
Logits exist only for trained tokens, a tile at a time (`trainer/logprobs.py`).

Letters: B rows, S tokens of a row, N trained tokens, V vocabulary, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from latepix.errors import ConfigError, PlaceholderMismatch, TrainerError
from latepix.families.base import Adapter, ForwardPolicy
from latepix.families.model_info import ModelInfo
from latepix.trace.training import MicroBatch
from latepix.trainer.logprobs import distribution, logprobs_and_entropies, output_weight
from latepix.trainer.materialize import MMInputs


class ForwardOutputs(msgspec.Struct, frozen=True):
    """What the forward says about the trained tokens of a micro batch, in the order of the tokens.

    Attributes:
        trainer_logprobs: [N] float32, nats, with gradient.
        entropies: [N] float32, nats, of the distribution each token was drawn from, with gradient.
    """

    trainer_logprobs: torch.Tensor
    entropies: torch.Tensor


class Rows(msgspec.Struct, frozen=True):
    """A micro batch laid out for the model.

    Attributes:
        input_ids: [B, S] int64.
        position_ids: [A, B, S] int64. With mrope, a packed row has an axis of restarting text positions in front; with
            rope, positions restart by themselves, and go on in the padding.
        columns: [T] int64: where token t of the micro batch lies in the flattened rows.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    columns: np.ndarray


def check_layout(wanted: str, policy: ForwardPolicy, *, family: str = "this family") -> None:
    """Refuse a layout in which samples of the family would see each other.

    Raises:
        ConfigError: names the family and what it allows.
    """
    if wanted != "auto" and wanted not in policy.layouts:
        raise ConfigError(
            f"trainer.layout: {wanted!r} is not safe for {family} (it allows {', '.join(policy.layouts)}): samples "
            "would see each other. Use 'auto'."
        )


def choose_layout(
    lengths: Sequence[int], policy: ForwardPolicy, *, hidden_size: int, wanted: Literal["auto", "packed", "padded"]
) -> Literal["packed", "padded"]:
    """Return the layout that is allowed and does the least work.

    A token costs about 12 D^2 multiplications in the linear layers and 2 D for every token it attends to.

    Raises:
        ConfigError: the wanted layout would leak between samples in this family.
    """
    check_layout(wanted, policy)
    if wanted != "auto":
        return wanted
    if "packed" not in policy.layouts:
        return "padded"
    total, longest = sum(lengths), max(lengths)
    packed = total * (6 * hidden_size + total)
    padded = len(lengths) * longest * (6 * hidden_size + longest)
    return "packed" if packed < padded or "padded" not in policy.layouts else "padded"


def lay_out(
    micro_batch: MicroBatch,
    grids: Sequence[tuple[int, int, int]],
    *,
    adapter: Adapter,
    info: ModelInfo,
    layout: Literal["packed", "padded"],
) -> Rows:
    """Lay samples out as rows and compute their positions one by one.

    Args:
        micro_batch: the samples.
        grids: of every slot, in the order of the tokens.
        adapter, info: of the model.
        layout: `packed` or `padded`.
    """
    lengths, starts = micro_batch.sample_lengths.astype(np.int64), micro_batch.sample_starts
    types = micro_batch.mm_token_type_ids
    slot_samples = np.searchsorted(starts, [ref.offset for ref in micro_batch.mm_refs.refs], side="right") - 1
    positions = []
    for sample, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        own = [grids[slot] for slot in np.flatnonzero(slot_samples == sample)]
        try:
            positions.append(adapter.position_ids(types[start : start + length], own, info))
        except PlaceholderMismatch as error:
            raise PlaceholderMismatch(f"Trace {micro_batch.trace_ids[sample]}: {error}") from error
    within = np.arange(len(types)) - np.repeat(starts, lengths)
    flat = np.concatenate(positions, axis=1)
    if layout == "packed":
        axes = flat if len(flat) == 1 else np.concatenate([within[None], flat])
        return Rows(
            input_ids=micro_batch.token_ids.astype(np.int64)[None],
            position_ids=axes[:, None],
            columns=np.arange(len(types)),
        )
    width = int(lengths.max())
    columns = np.repeat(np.arange(len(lengths)) * width, lengths) + within
    # The end-of-turn id fills the rest of a row: any id would do that is not a placeholder.
    ids = np.full(len(lengths) * width, info.stop_ids[0], dtype=np.int64)
    ids[columns] = micro_batch.token_ids
    # Hugging Face takes an axis that restarts for packed samples, and would build a mask.
    padded = np.tile(np.arange(width), (len(flat), len(lengths)))
    padded[:, columns] = flat
    return Rows(
        input_ids=ids.reshape(-1, width),
        position_ids=padded.reshape(len(flat), -1, width),
        columns=columns,
    )


def forward(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    mm_inputs: MMInputs,
    *,
    adapter: Adapter,
    info: ModelInfo,
    mm_forward_policy: ForwardPolicy,
    layout: Literal["auto", "packed", "padded"] = "auto",
    logits_bytes: int = 256_000_000,
    autocast: bool = False,
) -> ForwardOutputs:
    """Compute logprobs and entropies of the trained tokens.

    Args:
        model: from `adapter.load_model`.
        micro_batch: S samples, T tokens, N of them trained.
        mm_inputs: its pictures, from `materialize_mm_refs`.
        adapter, info: of the model.
        mm_forward_policy: the family's rules; usually `adapter.forward_policy`.
        layout: `auto` takes the cheaper one that is allowed.
        logits_bytes: of logits, and what is computed from them, that are alive together.
        autocast: multiply matrices in bfloat16; the weights stay as they are.
    Returns:
        [N] logprobs and entropies, in the order of the trained tokens.
    Raises:
        TrainerError: a sample is longer than the model's positions.
        PlaceholderMismatch: grids and token ranges do not fit.
        ConfigError: the layout is not safe for the family.
    """
    hidden, columns = _hidden(
        model,
        micro_batch,
        mm_inputs,
        adapter=adapter,
        info=info,
        policy=mm_forward_policy,
        layout=layout,
        autocast=autocast,
    )
    device = hidden.device
    trained = np.flatnonzero(micro_batch.loss_mask)
    sample_of = np.repeat(np.arange(micro_batch.num_samples), micro_batch.sample_lengths)
    # The logits of the token before predict a trained token; the first token of a sample is never trained.
    before = torch.from_numpy(columns[trained] - 1).to(device)
    weight = output_weight(model)
    # Outside of autocast, with a weight that is cast here: the backward must compute the very logits of the forward.
    logprobs, entropies = logprobs_and_entropies(
        hidden[before],
        weight.to(torch.bfloat16) if autocast else weight,
        torch.from_numpy(micro_batch.token_ids[trained].astype(np.int64)).to(device),
        torch.from_numpy(micro_batch.temperatures[sample_of[trained]].astype(np.float32)).to(device),
        torch.tensor(info.banned_ids, dtype=torch.long, device=device),
        logits_bytes=logits_bytes,
    )
    return ForwardOutputs(trainer_logprobs=logprobs, entropies=entropies)


def next_token_logprobs(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    mm_inputs: MMInputs,
    *,
    adapter: Adapter,
    info: ModelInfo,
    mm_forward_policy: ForwardPolicy,
    layout: Literal["auto", "packed", "padded"] = "auto",
    autocast: bool = False,
) -> torch.Tensor:
    """Compute what may follow each sample, under its temperature and the ban list; arguments as in `forward`.

    Returns:
        [S, V] float32, nats.
    """
    hidden, columns = _hidden(
        model,
        micro_batch,
        mm_inputs,
        adapter=adapter,
        info=info,
        policy=mm_forward_policy,
        layout=layout,
        autocast=autocast,
    )
    device = hidden.device
    last = columns[micro_batch.sample_starts + micro_batch.sample_lengths - 1]
    return distribution(
        adapter.lm_head(model, hidden[torch.from_numpy(last).to(device)].to(output_weight(model).dtype)),
        torch.from_numpy(micro_batch.temperatures.astype(np.float32)).to(device),
        torch.tensor(info.banned_ids, dtype=torch.long, device=device),
    )


def _hidden(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    mm_inputs: MMInputs,
    *,
    adapter: Adapter,
    info: ModelInfo,
    policy: ForwardPolicy,
    layout: Literal["auto", "packed", "padded"],
    autocast: bool,
) -> tuple[torch.Tensor, np.ndarray]:
    """Return the last hidden states [B*S, D] of the rows, and in which of them each token of the micro batch lies."""
    _check_lengths(micro_batch, info)
    device = next(model.parameters()).device
    chosen = choose_layout(
        micro_batch.sample_lengths.tolist(),
        policy,
        hidden_size=model.config.get_text_config().hidden_size,
        wanted=layout,
    )
    grids = [mm_inputs.images[index].grid_thw for index in mm_inputs.slot_images]
    rows = lay_out(micro_batch, grids, adapter=adapter, info=info, layout=chosen)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        hidden = adapter.forward_hidden(
            model,
            input_ids=torch.from_numpy(rows.input_ids).to(device),
            position_ids=torch.from_numpy(rows.position_ids).to(device),
            encoded=adapter.encode_images(model, mm_inputs.images) if mm_inputs.images else None,
            slot_images=mm_inputs.slot_images,
        )
    return hidden.flatten(0, 1), rows.columns


def _check_lengths(micro_batch: MicroBatch, info: ModelInfo) -> None:
    longest = int(np.argmax(micro_batch.sample_lengths))
    length = int(micro_batch.sample_lengths[longest])
    if length > info.max_position_embeddings:
        raise TrainerError(
            f"Trace {micro_batch.trace_ids[longest]}: the sample has {length} tokens, the model has positions for "
            f"{info.max_position_embeddings} (max_position_embeddings). Lower orchestrator.seq_len."
        )
