"""MicroBatch -> `trainer_logprobs` of the trained tokens, under the sampler's temperature and ban list.

Samples are laid out as one packed row or as rows padded on the right, whichever the family's policy allows and costs
less; both give what each sample gives alone. Positions are computed per sample from its picture ranges and grids.
Logits exist only for trained tokens, a chunk at a time.

Letters: B rows, S tokens of a row, N trained tokens, V vocabulary, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from latepix.errors import ConfigError
from latepix.families.base import Adapter, ForwardPolicy
from latepix.families.model_info import ModelInfo
from latepix.trace.training import MicroBatch
from latepix.trainer.materialize import MMInputs

#: A logit this low has probability exactly 0 in float32 and, unlike -inf, no NaN in the entropy's gradient.
_BANNED_LOGIT = -1e30


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
        position_ids: [A, B, S] int64, with an axis of restarting text positions in front for a packed row.
        columns: [T] int64: where token t of the micro batch lies in the flattened rows.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    columns: np.ndarray


def choose_layout(
    lengths: Sequence[int], policy: ForwardPolicy, *, hidden_size: int, wanted: Literal["auto", "packed", "padded"]
) -> Literal["packed", "padded"]:
    """Return the layout that is allowed and does the least work.

    A token costs about 12 D^2 multiplications in the linear layers and 2 D for every token it attends to.

    Raises:
        ConfigError: the wanted layout would leak between samples in this family.
    """
    if wanted != "auto":
        if wanted not in policy.layouts:
            raise ConfigError(
                f"trainer.layout: {wanted!r} is not safe for this family (it allows "
                f"{', '.join(policy.layouts)}): samples would see each other."
            )
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
        positions.append(adapter.position_ids(types[start : start + length], own, info))
    within = np.arange(len(types)) - np.repeat(starts, lengths)
    flat = np.concatenate(positions, axis=1)
    if layout == "packed":
        return Rows(
            input_ids=micro_batch.token_ids.astype(np.int64)[None],
            position_ids=np.concatenate([within[None], flat])[:, None],
            columns=np.arange(len(types)),
        )
    width = int(lengths.max())
    columns = np.repeat(np.arange(len(lengths)) * width, lengths) + within
    # The end-of-turn id fills the rest of a row: any id would do that is not a placeholder.
    ids = np.full(len(lengths) * width, info.stop_ids[0], dtype=np.int64)
    ids[columns] = micro_batch.token_ids
    padded = np.zeros((len(flat), len(ids)), dtype=np.int64)
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
    chunk_tokens: int = 2048,
) -> ForwardOutputs:
    """Compute logprobs and entropies of the trained tokens.

    Args:
        model: from `adapter.load_model`.
        micro_batch: S samples, T tokens, N of them trained.
        mm_inputs: its pictures, from `materialize_mm_refs`.
        adapter, info: of the model.
        mm_forward_policy: the family's rules; usually `adapter.forward_policy`.
        layout: `auto` takes the cheaper one that is allowed.
        chunk_tokens: trained tokens whose logits exist at the same time.
    Returns:
        [N] logprobs and entropies, in the order of the trained tokens.
    Raises:
        PlaceholderMismatch: grids and token ranges do not fit.
        ConfigError: the layout is not safe for the family.
    """
    hidden, columns = _hidden(
        model, micro_batch, mm_inputs, adapter=adapter, info=info, policy=mm_forward_policy, layout=layout
    )
    device = hidden.device
    trained = np.flatnonzero(micro_batch.loss_mask)
    sample_of = np.repeat(np.arange(micro_batch.num_samples), micro_batch.sample_lengths)
    # The logits of the token before predict a trained token; the first token of a sample is never trained.
    before = torch.from_numpy(columns[trained] - 1).to(device)
    return _logprobs(
        model,
        adapter,
        hidden[before],
        torch.from_numpy(micro_batch.token_ids[trained].astype(np.int64)).to(device),
        torch.from_numpy(micro_batch.temperatures[sample_of[trained]].astype(np.float32)).to(device),
        torch.tensor(info.banned_ids, dtype=torch.long, device=device),
        chunk_tokens,
    )


def next_token_logprobs(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    mm_inputs: MMInputs,
    *,
    adapter: Adapter,
    info: ModelInfo,
    mm_forward_policy: ForwardPolicy,
    layout: Literal["auto", "packed", "padded"] = "auto",
) -> torch.Tensor:
    """Compute what may follow each sample, under its temperature and the ban list; arguments as in `forward`.

    Returns:
        [S, V] float32, nats.
    """
    hidden, columns = _hidden(
        model, micro_batch, mm_inputs, adapter=adapter, info=info, policy=mm_forward_policy, layout=layout
    )
    device = hidden.device
    last = columns[micro_batch.sample_starts + micro_batch.sample_lengths - 1]
    return _distribution(
        adapter.lm_head(model, hidden[torch.from_numpy(last).to(device)]),
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
) -> tuple[torch.Tensor, np.ndarray]:
    """Return the last hidden states [B*S, D] of the rows, and in which of them each token of the micro batch lies."""
    device = next(model.parameters()).device
    chosen = choose_layout(
        micro_batch.sample_lengths.tolist(),
        policy,
        hidden_size=model.config.get_text_config().hidden_size,
        wanted=layout,
    )
    grids = [mm_inputs.images[index].grid_thw for index in mm_inputs.slot_images]
    rows = lay_out(micro_batch, grids, adapter=adapter, info=info, layout=chosen)
    hidden = adapter.forward_hidden(
        model,
        input_ids=torch.from_numpy(rows.input_ids).to(device),
        position_ids=torch.from_numpy(rows.position_ids).to(device),
        encoded=adapter.encode_images(model, mm_inputs.images) if mm_inputs.images else None,
        slot_images=mm_inputs.slot_images,
    )
    return hidden.flatten(0, 1), rows.columns


def _distribution(logits_NV: torch.Tensor, temperatures_N: torch.Tensor, banned: torch.Tensor) -> torch.Tensor:
    """Return [N, V] float32 log-probabilities of the distribution that is sampled from."""
    return torch.log_softmax(logits_NV.float().index_fill(1, banned, _BANNED_LOGIT) / temperatures_N[:, None], dim=-1)


def _logprobs(
    model: PreTrainedModel,
    adapter: Adapter,
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    temperatures_N: torch.Tensor,
    banned: torch.Tensor,
    chunk_tokens: int,
) -> ForwardOutputs:
    def chunk(hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logprobs = _distribution(adapter.lm_head(model, hidden), temperatures, banned)
        entropies = -(logprobs.exp() * logprobs).sum(dim=-1)
        return logprobs.gather(1, targets[:, None])[:, 0], entropies

    pieces = list(
        zip(
            hidden_ND.split(chunk_tokens),
            targets_N.split(chunk_tokens),
            temperatures_N.split(chunk_tokens),
            strict=True,
        )
    )
    if len(pieces) == 1:
        results = [chunk(*pieces[0])]
    else:
        # Recomputing a chunk's logits in the backward keeps one chunk alive instead of all.
        results = [checkpoint(chunk, *piece, use_reentrant=False) for piece in pieces]
    return ForwardOutputs(
        trainer_logprobs=torch.cat([logprobs for logprobs, _ in results]),
        entropies=torch.cat([entropies for _, entropies in results]),
    )
