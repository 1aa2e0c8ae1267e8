"""Hidden states of trained tokens -> their logprobs and the entropies they were drawn under, without [N, V] logits.

Where all logits are few, plain autograd does it. Else logits exist one tile at a time, in the forward and once more
in the backward: an online logsumexp goes through the vocabulary, and the gradients are known in closed form. With
z = logits / temperature, p = softmax(z), H the entropy and y the target:

    d logprob / dz_v = 1[v = y] - p_v           d H / dz_v = -p_v * (log p_v + H)

Matrix products run in the model's dtype, everything else in float32. A banned id has probability exactly 0 and gets
no gradient.

Letters: N trained tokens, V vocabulary, D features; n and v are a tile's share of N and V.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from latepix.errors import ConfigError

#: A logit this low has probability exactly 0 in float32 and, unlike -inf, no NaN in the entropy's gradient.
BANNED_LOGIT = -1e30
#: Matrices of the size of the logits that are alive together: in plain autograd, and when working on a tile.
_PLAIN_COPIES, _TILE_COPIES = 5, 2
#: Tokens of a tile, where there are that many: enough for the matrix products to run at full speed.
_TILE_TOKENS = 1024


def output_weight(model: PreTrainedModel) -> torch.Tensor:
    """Return [V, D], the weight of the output layer.

    Raises:
        ConfigError: the output layer is more than a matrix.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear) or layer.bias is not None:
        found = "has a bias" if isinstance(layer, nn.Linear) else f"is a {type(layer).__name__}"
        raise ConfigError(
            f"The output layer of {type(model).__name__} {found}; wanted a plain matrix (nn.Linear without bias). "
            "Logprobs of this family would be wrong: extend latepix/trainer/logprobs.py first."
        )
    return layer.weight


def distribution(logits_NV: torch.Tensor, temperatures_N: torch.Tensor, banned: torch.Tensor) -> torch.Tensor:
    """Return [N, V] float32 log-probabilities of the distribution that is sampled from."""
    scaled = _floats(logits_NV).index_fill(1, banned, BANNED_LOGIT) / temperatures_N[:, None]
    return torch.log_softmax(scaled, dim=-1)


def logprobs_and_entropies(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    temperatures_N: torch.Tensor,
    banned: torch.Tensor,
    *,
    logits_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the targets' logprobs and the entropies, with gradients for hidden states and weight.

    Args:
        hidden_ND: [N, D] float32 or bfloat16 (float64 in tests).
        weight_VD: [V, D], the output layer.
        targets_N: [N] int64.
        temperatures_N: [N] float32; logits are divided by them.
        banned: int64 ids that are never sampled.
        logits_bytes: of float32 matrices of the logits' kind that are alive together; does not change the result
            beyond rounding.
    Returns:
        [N] logprobs and [N] entropies, float32, nats.
    """
    num_tokens, vocabulary = len(hidden_ND), len(weight_VD)
    hidden_ND = hidden_ND.to(weight_VD.dtype)
    itemsize = max(4, weight_VD.element_size())
    if num_tokens * vocabulary * itemsize * _PLAIN_COPIES <= logits_bytes:
        logprobs_NV = distribution(F.linear(hidden_ND, weight_VD), temperatures_N, banned)
        entropies_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
        return logprobs_NV.gather(1, targets_N[:, None])[:, 0], entropies_N
    tile = tile_shape(num_tokens, vocabulary, num_logits=logits_bytes // (itemsize * _TILE_COPIES))
    return _Tiled.apply(hidden_ND, weight_VD, targets_N, temperatures_N, banned, tile)


def tile_shape(num_tokens: int, vocabulary: int, *, num_logits: int) -> tuple[int, int]:
    """Return tokens and vocabulary entries of a tile of at most `num_logits` logits (and at least one).

    Worked example: 8,192 tokens, 151,936 entries, 32,000,000 logits: 1,024 x 31,250. With 1,000 entries instead, all of
    them fit beside each other and the tile takes all 8,192 tokens.
    """
    tokens = max(1, min(num_tokens, _TILE_TOKENS, num_logits))
    entries = max(1, min(vocabulary, num_logits // tokens))
    if entries == vocabulary:
        tokens = max(1, min(num_tokens, num_logits // entries))
    return tokens, entries


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        temperatures_N: torch.Tensor,
        banned: torch.Tensor,
        tile: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        dtype = _work_dtype(weight_VD)
        # Of exp(z - highest) over the entries seen so far: its sum, and its sum weighted by z - highest.
        highest_N = hidden_ND.new_full((len(hidden_ND),), BANNED_LOGIT, dtype=dtype)
        sums_N, weighted_N, target_z_N = (torch.zeros_like(highest_N) for _ in range(3))
        for entries, banned_v in _vocabulary_tiles(weight_VD, banned, tile[1]):
            for tokens in _slices(len(hidden_ND), tile[0]):
                z_nv = _tile(hidden_ND[tokens], weight_VD[entries], temperatures_N[tokens], banned_v)
                rows, columns = _targets_in(targets_N[tokens], entries)
                target_z_N[tokens].index_copy_(0, rows, z_nv[rows, columns])
                old = highest_N[tokens]
                new = torch.maximum(old, z_nv.amax(dim=-1))
                shrink = (old - new).exp()
                exp_nv = z_nv.sub_(new[:, None]).exp()
                weighted_N[tokens] = shrink * (weighted_N[tokens] + sums_N[tokens] * (old - new))
                sums_N[tokens] = shrink * sums_N[tokens] + exp_nv.sum(dim=-1)
                weighted_N[tokens] += exp_nv.mul_(z_nv).sum(dim=-1)
                highest_N[tokens] = new
        log_sums_N = sums_N.log()
        entropies_N = log_sums_N - weighted_N / sums_N
        ctx.tile = tile
        ctx.save_for_backward(
            hidden_ND, weight_VD, targets_N, temperatures_N, banned, highest_N + log_sums_N, entropies_N
        )
        return target_z_N - highest_N - log_sums_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs_N: torch.Tensor | None, of_entropies_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, targets_N, temperatures_N, banned, normalizers_N, entropies_N = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        # Vocabulary outside, tokens inside: a tile of the weight's gradient is summed in float32 and cast once.
        of_hidden_ND = torch.zeros_like(hidden_ND, dtype=normalizers_N.dtype) if wants_hidden else None
        of_weight_VD = torch.empty_like(weight_VD) if wants_weight else None
        for entries, banned_v in _vocabulary_tiles(weight_VD, banned, ctx.tile[1]):
            weight_vD = weight_VD[entries]
            of_weight_vD = torch.zeros_like(weight_vD, dtype=normalizers_N.dtype) if wants_weight else None
            for tokens in _slices(len(hidden_ND), ctx.tile[0]):
                hidden_nD = hidden_ND[tokens]
                logprobs_nv = _tile(hidden_nD, weight_vD, temperatures_N[tokens], banned_v)
                logprobs_nv.sub_(normalizers_N[tokens, None])
                of_logits_nv = _of_logits(
                    logprobs_nv,
                    entropies_N[tokens],
                    None if of_logprobs_N is None else of_logprobs_N[tokens],
                    None if of_entropies_N is None else of_entropies_N[tokens],
                    _targets_in(targets_N[tokens], entries),
                )
                of_logits_nv.div_(temperatures_N[tokens, None]).index_fill_(1, banned_v, 0.0)
                of_logits_nv = of_logits_nv.to(weight_VD.dtype)
                if of_hidden_ND is not None:
                    of_hidden_ND[tokens] += of_logits_nv @ weight_vD
                if of_weight_vD is not None:
                    of_weight_vD += of_logits_nv.T @ hidden_nD
                # Frees the tile before the next one is made.
                del logprobs_nv, of_logits_nv
            if of_weight_VD is not None and of_weight_vD is not None:
                of_weight_VD[entries] = of_weight_vD
        of_hidden = None if of_hidden_ND is None else of_hidden_ND.to(hidden_ND.dtype)
        return of_hidden, of_weight_VD, None, None, None, None


def _of_logits(
    logprobs_nv: torch.Tensor,
    entropies_n: torch.Tensor,
    of_logprobs_n: torch.Tensor | None,
    of_entropies_n: torch.Tensor | None,
    targets: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the gradient of z, in the memory of the logprobs; see the formulas at the top."""
    probabilities_nv = logprobs_nv.exp()
    if of_entropies_n is None:
        logprobs_nv.zero_()
    else:
        logprobs_nv.add_(entropies_n[:, None]).mul_(of_entropies_n[:, None])
    if of_logprobs_n is not None:
        logprobs_nv.add_(of_logprobs_n[:, None])
    gradient_nv = logprobs_nv.mul_(probabilities_nv).neg_()
    if of_logprobs_n is not None:
        rows, columns = targets
        gradient_nv.index_put_((rows, columns), of_logprobs_n[rows], accumulate=True)
    return gradient_nv


def _tile(
    hidden_nD: torch.Tensor, weight_vD: torch.Tensor, temperatures_n: torch.Tensor, banned_v: torch.Tensor
) -> torch.Tensor:
    """Return z, [n, v] float32, in memory of its own."""
    return _floats(F.linear(hidden_nD, weight_vD)).index_fill_(1, banned_v, BANNED_LOGIT).div_(temperatures_n[:, None])


def _floats(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(_work_dtype(logits))


def _work_dtype(tensor: torch.Tensor) -> torch.dtype:
    # float64 is for checks of the gradient.
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _vocabulary_tiles(weight_VD: torch.Tensor, banned: torch.Tensor, size: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield ranges of the vocabulary, each with the banned ids in it, counted from its start."""
    for entries in _slices(len(weight_VD), size):
        yield entries, banned[(banned >= entries.start) & (banned < entries.stop)] - entries.start


def _targets_in(targets_n: torch.Tensor, entries: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows whose target lies in a range of the vocabulary, and where it lies in it."""
    rows = torch.nonzero((targets_n >= entries.start) & (targets_n < entries.stop))[:, 0]
    return rows, targets_n[rows] - entries.start
