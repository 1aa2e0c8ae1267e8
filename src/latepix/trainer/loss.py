"""The losses: pure functions of tensors. N is the trained tokens of one micro batch.

A policy loss gives every trained token a term (`TokenTerms`); `policy_loss` weighs the terms, adds what every loss may
have (entropy bonus, KL to a reference) and measures. With r_t = exp(trainer_t - inference_t), A_t the advantage and
w_t the weight of a token:

    loss = sum_t w_t * (term_t - entropy_bonus * H_t + kl_weight * k3_t)

    w_t = 1 / N_total                                 denominator `tokens`: every token of the batch counts the same
    w_t = 1 / (S_total * trained tokens of t's sample)  denominator `samples`: every sample counts the same
    k3_t = exp(ref_t - trainer_t) - (ref_t - trainer_t) - 1        GRPO, arXiv:2402.03300, eq. 4
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec
import torch

Denominator: TypeAlias = Literal["tokens", "samples"]


class LossInputs(msgspec.Struct, frozen=True):
    """What a loss may look at.

    Attributes:
        trainer_logprobs: [N] float32, nats, with gradient.
        inference_logprobs: [N] float32, nats, by the server.
        advantages: [N] float32.
        entropies: [N] float32, nats, with gradient.
        num_loss_tokens: trained tokens of the whole batch, over all micro batches.
        sample_ids: [N] int64, which sample of the micro batch each token belongs to; None: all to one.
        num_loss_samples: samples of the whole batch that have trained tokens.
        reference_logprobs: [N] float32, nats, by the frozen starting model; None without a reference.
    """

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    advantages: torch.Tensor
    entropies: torch.Tensor
    num_loss_tokens: int
    sample_ids: torch.Tensor | None = None
    num_loss_samples: int = 1
    reference_logprobs: torch.Tensor | None = None

    @property
    def log_ratios(self) -> torch.Tensor:
        """[N] log of the importance ratios, with gradient."""
        return self.trainer_logprobs - self.inference_logprobs

    def sample_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return [N]: for each token the sum of [N] values over its sample."""
        ids = self._ids()
        sums = values.new_zeros(int(ids.max()) + 1 if len(ids) else 0)
        return sums.index_add(0, ids, values)[ids]

    def weights(self, denominator: Denominator) -> torch.Tensor:
        """Return [N] weights of the tokens' terms; over the whole batch they sum to 1."""
        ones = torch.ones_like(self.inference_logprobs)
        if denominator == "tokens":
            return ones / self.num_loss_tokens
        return ones / (self.sample_sums(ones) * self.num_loss_samples)

    def _ids(self) -> torch.Tensor:
        if self.sample_ids is None:
            return torch.zeros_like(self.inference_logprobs, dtype=torch.long)
        return self.sample_ids


class TokenTerms(msgspec.Struct, frozen=True):
    """What a policy loss says about each token.

    Attributes:
        values: [N], with gradient; lower is better.
        is_clipped: [N] bool: the token's ratio or probability has moved too far to pull any further.
    """

    values: torch.Tensor
    is_clipped: torch.Tensor


class LossOutputs(msgspec.Struct, frozen=True):
    """A loss and what is worth knowing about it.

    Attributes:
        loss: scalar, with gradient; the micro batches' losses sum to the batch's.
        sums: scalars that are added over micro batches and divided by `num_loss_tokens`.
        maxima: scalars whose maximum over micro batches is kept.
    """

    loss: torch.Tensor
    sums: dict[str, float]
    maxima: dict[str, float]


TokenLoss: TypeAlias = Callable[[LossInputs], TokenTerms]


def trust_region(
    inputs: LossInputs,
    *,
    max_prob_increase: float,
    max_prob_decrease: float,
    log_ratio_penalty: float = 0.0,
    importance_cap: float | None = None,
) -> TokenTerms:
    """Importance-ratio policy gradient, masked where a token's probability has moved far enough.

    With p, q the trainer's and the server's probability of the token:

        term_t = - m_t * min(r_t, cap) * A_t  +  penalty * (log r_t)^2

    m_t is 0 where A_t > 0 and p_t - q_t > max_prob_increase, or A_t < 0 and q_t - p_t > max_prob_decrease; else 1.
    Bounding probabilities instead of ratios lets rare tokens move by large factors while they are still rare. A ratio
    above the cap keeps its direction, with the cap as its weight: its gradient is cap * A_t * grad log p_t.

    Args:
        inputs: [N] tensors.
        max_prob_increase, max_prob_decrease: in (0, 1].
        log_ratio_penalty: weight, at least 0.
        importance_cap: at least 1; None for none.
    Source: the default loss of prime-rl (mask by probability difference); importance ratios: arXiv:1707.06347,
        section 3, without the clip; truncated importance sampling: Ionides, 2008 (J. Comput. Graph. Stat. 17),
        as IMPALA uses it for stale samples, arXiv:1802.01561.
    """
    ratio = inputs.log_ratios.exp()
    with torch.no_grad():
        moved = inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp()
        is_masked = torch.where(inputs.advantages > 0, moved > max_prob_increase, -moved > max_prob_decrease)
        is_masked &= inputs.advantages != 0
    if importance_cap is not None:
        ratio = ratio * (importance_cap / ratio.detach()).clamp(max=1.0)
    values = -(ratio * inputs.advantages).masked_fill(is_masked, 0.0)
    if log_ratio_penalty:
        values = values + log_ratio_penalty * inputs.log_ratios.square()
    return TokenTerms(values=values, is_clipped=is_masked)


def grpo_clip(inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> TokenTerms:
    """PPO's clipped ratio with group advantages; the two sides of the clip are set apart from each other.

        term_t = - min(r_t * A_t, clip(r_t, 1 - clip_low, 1 + clip_high) * A_t)
        and where A_t < 0, with dual_clip c:  term_t = min(term_t, - c * A_t)

    The dual clip bounds what a token with negative advantage and a ratio far above 1 may do.

    Args:
        inputs: [N] tensors.
        clip_low: in (0, 1].
        clip_high: above 0.
        dual_clip: above 1; None for none.
    Source: PPO arXiv:1707.06347, eq. 7; GRPO arXiv:2402.03300, eq. 3; decoupled sides: DAPO arXiv:2503.14476, eq. 10;
        dual clip: arXiv:1912.09729, eq. 5.
    """
    return _clipped(inputs.log_ratios.exp(), inputs.advantages, clip_low, clip_high, dual_clip)


def cispo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> TokenTerms:
    """The importance ratio is clipped and held fast, so that every token keeps a gradient.

        term_t = - clip(r_t, 1 - clip_low, 1 + clip_high)[no gradient] * A_t * log p_t

    Args:
        inputs: [N] tensors.
        clip_low: in (0, 1]; 1 means no lower bound.
        clip_high: above 0.
    Source: MiniMax-M1, arXiv:2506.13585, eq. 4 and 5.
    """
    ratio = inputs.log_ratios.detach().exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenTerms(values=-clipped * inputs.advantages * inputs.trainer_logprobs, is_clipped=clipped != ratio)


def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> TokenTerms:
    """One ratio for a whole sample: the geometric mean of its tokens' ratios, clipped as in PPO.

        s = exp(mean over the sample's trained tokens of log r_t)
        term_t = - min(s * A_t, clip(s, 1 - clip_low, 1 + clip_high) * A_t)

    With the denominator `samples` and one advantage per sample this is GSPO's objective.

    Args:
        inputs: [N] tensors; a sample lies in one micro batch.
        clip_low: in (0, 1].
        clip_high: above 0.
    Source: arXiv:2507.18071, eq. 5 and 7.
    """
    lengths = inputs.sample_sums(torch.ones_like(inputs.inference_logprobs))
    ratio = (inputs.sample_sums(inputs.log_ratios) / lengths).exp()
    return _clipped(ratio, inputs.advantages, clip_low, clip_high, None)


def _clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenTerms:
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    values = torch.maximum(plain, bounded)
    is_clipped = (bounded > plain).detach()
    if dual_clip is not None:
        limit = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        is_clipped |= values.detach() > limit
        values = torch.minimum(values, limit)
    return TokenTerms(values=values, is_clipped=is_clipped)


def policy_loss(
    inputs: LossInputs,
    terms: TokenTerms,
    *,
    denominator: Denominator = "tokens",
    entropy_bonus: float = 0.0,
    kl_weight: float = 0.0,
) -> LossOutputs:
    """Weigh the tokens' terms and add entropy bonus and reference KL; the formulas are at the top.

    Args:
        inputs: [N] tensors.
        terms: of a policy loss.
        denominator: `tokens` or `samples`.
        entropy_bonus, kl_weight: at least 0; a `kl_weight` above 0 needs `inputs.reference_logprobs`.
    Returns:
        The loss, with mismatch KL (`ratio - log_ratio - 1`), ratio, entropy, clipped share and reference KL.
    """
    weights = inputs.weights(denominator)
    policy = (weights * terms.values).sum()
    loss = policy
    sums: dict[str, float] = {}
    if entropy_bonus:
        loss = loss - entropy_bonus * (weights * inputs.entropies).sum()
    if inputs.reference_logprobs is not None:
        reference_kl = _k3(inputs.reference_logprobs - inputs.trainer_logprobs)
        sums["loss/reference_kl/mean"] = float(reference_kl.detach().sum())
        if kl_weight:
            loss = loss + kl_weight * (weights * reference_kl).sum()
    log_ratio = inputs.log_ratios.detach()
    # In float64: for nearly equal logprobs the KL is the small difference of large numbers.
    mismatch_kl = _k3(log_ratio.double())
    ratio = log_ratio.exp()
    sums |= {
        # Sums are divided by the tokens later; this one has its denominator already.
        "loss/policy": float(policy.detach()) * inputs.num_loss_tokens,
        "loss/entropy/mean": float(inputs.entropies.detach().sum()),
        "loss/mismatch_kl/mean": float(mismatch_kl.sum()),
        "loss/importance_ratio/mean": float(ratio.sum()),
        "loss/clipped/frac": float(terms.is_clipped.sum()),
    }
    maxima = {
        "loss/mismatch_kl/max": float(mismatch_kl.max()),
        "loss/importance_ratio/max": float(ratio.max()),
    }
    return LossOutputs(loss=loss, sums=sums, maxima=maxima)


def cross_entropy(inputs: LossInputs) -> LossOutputs:
    """Negative log-likelihood of the trained tokens, for supervised samples.

    loss = - sum_t log p_t / N_total
    """
    negative_logprob = -inputs.trainer_logprobs.sum()
    return LossOutputs(
        loss=negative_logprob / inputs.num_loss_tokens,
        sums={
            "loss/cross_entropy/mean": float(negative_logprob.detach()),
            "loss/entropy/mean": float(inputs.entropies.detach().sum()),
        },
        maxima={},
    )


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(x) - 1 - x, at least 0: the KL's estimator with low variance."""
    return torch.expm1(log_ratio) - log_ratio
