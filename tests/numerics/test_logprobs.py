"""Logprobs and entropies = those of softmax(logits / temperature) over the ids that may be sampled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from latepix.trace.training import TrainingSample
from tests.tiny.policy import (
    Policy,
    assert_same_gradients,
    draw,
    gradients,
    load_policy,
    make_sample,
    score,
)


def all_logprobs(policy: Policy, temperature: float) -> torch.Tensor:
    """Return [V] logprobs of every id as the answer to one prompt: V samples that differ in their last token."""
    sample = make_sample(policy.info, 7, answer=1, temperature=temperature)
    samples = []
    for token in range(policy.info.vocab_size):
        ids = sample.token_ids.copy()
        ids[-1] = token
        samples.append(
            TrainingSample(
                token_ids=ids,
                loss_mask=sample.loss_mask,
                inference_logprobs=sample.inference_logprobs,
                advantages=sample.advantages,
                mm_refs=sample.mm_refs,
                temperature=temperature,
            )
        )
    with torch.no_grad():
        return score(policy, samples, layout="padded").trainer_logprobs


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_probabilities_of_the_allowed_ids_sum_to_one(policy: Policy, temperature: float) -> None:
    logprobs = all_logprobs(policy, temperature).double()
    banned = list(policy.info.banned_ids)
    # 384 float32 terms: 1e-5 is a few roundings of the largest.
    assert abs(float(logprobs.exp().sum()) - 1) < 1e-5
    assert float(logprobs[banned].exp().sum()) == 0.0
    allowed = np.setdiff1d(np.arange(policy.info.vocab_size), banned).tolist()
    entropy = -(logprobs[allowed].exp() * logprobs[allowed]).sum()
    sample = make_sample(policy.info, 7, answer=1, temperature=temperature)
    assert abs(float(score(policy, [sample]).entropies[0].detach()) - float(entropy)) < 1e-4


def test_a_lower_temperature_is_sharper(policy: Policy) -> None:
    sharp, plain, flat = (all_logprobs(policy, temperature) for temperature in (0.3, 1.0, 2.5))
    assert sharp.max() > plain.max() > flat.max()
    ids = list({*range(policy.info.vocab_size)} - {*policy.info.banned_ids})
    # log p_T = z / T - const: differences of logprobs scale with 1 / T.
    wide, narrow = sharp[ids] - sharp[ids[0]], flat[ids] - flat[ids[0]]
    torch.testing.assert_close(wide * 0.3, narrow * 2.5, atol=1e-3, rtol=1e-4)


def test_entropy_has_the_right_gradient_and_no_nan_beside_banned_ids(policy: Policy) -> None:
    samples = [make_sample(policy.info, 4, draw(32, 32, seed=2), 3, answer=4, temperature=0.8)]
    found = gradients(policy, score(policy, samples).entropies.sum())
    assert all(bool(torch.isfinite(gradient).all()) for gradient in found.values())
    # Central differences along the gradient of the output layer, in float32: 1 % is what rounding leaves of them.
    name = "model.language_model.embed_tokens.weight"
    direction = found[name] / found[name].norm()
    weight = dict(policy.model.named_parameters())[name]
    before, values, step = weight.detach().clone(), [], 3e-3
    with torch.no_grad():
        for sign in (1, -1):
            weight.copy_(before + sign * step * direction)
            values.append(float(score(policy, samples).entropies.double().sum()))
        weight.copy_(before)
    slope = (values[0] - values[1]) / (2 * step)
    assert slope == pytest.approx(float(found[name].norm()), rel=0.01)


@pytest.mark.parametrize("logits_bytes", [1, 3000, 20_000])
def test_tiles_equal_the_whole(policy: Policy, logits_bytes: int) -> None:
    samples = [
        make_sample(policy.info, 4, draw(64, 32, seed=3), 2, answer=5, seed=1),
        make_sample(policy.info, 6, answer=6, seed=2, temperature=0.7),
    ]
    whole, tiled = (score(policy, samples, logits_bytes=size) for size in (1 << 40, logits_bytes))
    # A row of logits is computed from other rows of the same matrix product: rounding only.
    assert (whole.trainer_logprobs - tiled.trainer_logprobs).abs().max() < 1e-5
    assert (whole.entropies - tiled.entropies).abs().max() < 1e-5
    one, other = (
        gradients(policy, outputs.trainer_logprobs.sum() + outputs.entropies.square().sum())
        for outputs in (whole, tiled)
    )
    assert_same_gradients(one, other, rtol=2e-5)


def test_bfloat16_loads_and_is_close_to_float32(sharp_model: Path, policy: Policy) -> None:
    halved = load_policy(sharp_model, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in halved.model.parameters()} == {torch.bfloat16}
    samples = [make_sample(policy.info, 4, draw(64, 32, seed=3), 2, answer=5), make_sample(policy.info, 5, answer=5)]
    outputs = score(halved, samples)
    assert outputs.trainer_logprobs.dtype == torch.float32
    assert torch.isfinite(outputs.trainer_logprobs).all()
    outputs.trainer_logprobs.sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in halved.model.parameters() if p.grad is not None)
    # 8 bits of mantissa and logits of about 10: a mean of some tenths of a nat, far from the spread of the logprobs.
    wanted = score(policy, samples).trainer_logprobs
    assert (outputs.trainer_logprobs - wanted).abs().mean() < 0.5
    assert wanted.std() > 2
    assert torch.isfinite(outputs.entropies).all()
