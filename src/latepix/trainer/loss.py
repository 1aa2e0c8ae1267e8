"""The losses: pure functions of tensors. N is the trained tokens of one micro batch."""

from __future__ import annotations

import msgspec
import torch


class LossInputs(msgspec.Struct, frozen=True):
    """What a loss may look at.

    Attributes:
        trainer_logprobs: [N] float32, nats, with gradient.
        inference_logprobs: [N] float32, nats, by the server.
        advantages: [N] float32.
        entropies: [N] float32, nats, with gradient.
        num_loss_tokens: trained tokens of the whole batch, over all micro batches: the one denominator.
    """

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    advantages: torch.Tensor
    entropies: torch.Tensor
    num_loss_tokens: int


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


def trust_region_policy_gradient(
    inputs: LossInputs,
    *,
    max_prob_increase: float,
    max_prob_decrease: float,
    log_ratio_penalty: float,
    entropy_bonus: float,
) -> LossOutputs:
    """Importance-ratio policy gradient, masked where a token's probability has moved far enough.

    With r = exp(trainer - inference) and p, q the trainer's and the server's probability of the token:

        loss = ( - sum_t m_t r_t A_t  +  penalty * sum_t (log r_t)^2  -  bonus * sum_t H_t ) / N_total

    m_t is 0 where A_t > 0 and p_t - q_t > max_prob_increase, or A_t < 0 and q_t - p_t > max_prob_decrease; else 1.
    Clipping probabilities instead of ratios lets rare tokens move by large factors while they are still rare.

    Args:
        inputs: [N] tensors.
        max_prob_increase, max_prob_decrease: in (0, 1].
        log_ratio_penalty, entropy_bonus: weights, at least 0.
    Returns:
        The loss, with mismatch KL (`ratio - log_ratio - 1`), ratio, entropy and masked share.
    Source: the default loss of prime-rl (probability-difference mask); policy gradient with importance ratios:
        arXiv:1707.06347, section 3, without the clip.
    """
    log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
    ratio = log_ratio.exp()
    with torch.no_grad():
        moved = inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp()
        is_masked = torch.where(inputs.advantages > 0, moved > max_prob_increase, -moved > max_prob_decrease)
        is_masked &= inputs.advantages != 0
    policy = -(ratio * inputs.advantages).masked_fill(is_masked, 0.0).sum()
    total = policy
    if log_ratio_penalty:
        total = total + log_ratio_penalty * log_ratio.square().sum()
    if entropy_bonus:
        total = total - entropy_bonus * inputs.entropies.sum()
    loss = total / inputs.num_loss_tokens
    # In float64: for nearly equal logprobs the KL is the small difference of large numbers.
    exact = log_ratio.detach().double()
    mismatch_kl = torch.expm1(exact) - exact
    return LossOutputs(
        loss=loss,
        sums={
            "loss/policy": float(policy.detach()),
            "loss/entropy/mean": float(inputs.entropies.detach().sum()),
            "loss/mismatch_kl/mean": float(mismatch_kl.sum()),
            "loss/importance_ratio/mean": float(ratio.detach().sum()),
            "loss/trust_region_masked/frac": float(is_masked.sum()),
        },
        maxima={
            "loss/mismatch_kl/max": float(mismatch_kl.max()),
            "loss/importance_ratio/max": float(ratio.detach().max()),
        },
    )


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
