"""The losses against derivatives by hand, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from latepix.trainer.loss import LossInputs, LossOutputs, cross_entropy, trust_region_policy_gradient

SETTINGS: dict[str, Any] = {
    "max_prob_increase": 0.2,
    "max_prob_decrease": 0.2,
    "log_ratio_penalty": 0.0,
    "entropy_bonus": 0.0,
}


def make_inputs(
    *, now: list[float], then: list[float], advantages: list[float], num_loss_tokens: int | None = None
) -> LossInputs:
    """Build inputs from probabilities, in float64."""
    return LossInputs(
        trainer_logprobs=torch.tensor(now, dtype=torch.float64).log().requires_grad_(),
        inference_logprobs=torch.tensor(then, dtype=torch.float64).log(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        entropies=torch.full((len(now),), 2.0, dtype=torch.float64, requires_grad=True),
        num_loss_tokens=num_loss_tokens or len(now),
    )


def policy_gradient(inputs: LossInputs, **changes: Any) -> LossOutputs:
    return trust_region_policy_gradient(inputs, **(SETTINGS | changes))


def logprob_gradient(outputs: LossOutputs, inputs: LossInputs) -> torch.Tensor:
    outputs.loss.backward()
    assert inputs.trainer_logprobs.grad is not None
    return inputs.trainer_logprobs.grad


def test_the_gradient_equals_the_derivative_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.empty(64, dtype=torch.float64).uniform_(-3, -0.05, generator=generator)
    inputs = LossInputs(
        trainer_logprobs=logprobs.clone().requires_grad_(),
        inference_logprobs=logprobs + 0.6 * torch.randn(64, generator=generator, dtype=torch.float64),
        advantages=torch.randn(64, generator=generator, dtype=torch.float64),
        entropies=torch.rand(64, generator=generator, dtype=torch.float64).requires_grad_(),
        num_loss_tokens=100,
    )
    outputs = policy_gradient(inputs, log_ratio_penalty=0.3, entropy_bonus=0.05)
    gradient = logprob_gradient(outputs, inputs)
    num_masked = 0
    for index in range(64):
        p, q = math.exp(float(logprobs[index])), math.exp(float(inputs.inference_logprobs[index]))
        advantage, log_ratio = float(inputs.advantages[index]), math.log(p / q)
        is_masked = (advantage > 0 and p - q > 0.2) or (advantage < 0 and q - p > 0.2)
        num_masked += is_masked
        wanted = (-(0 if is_masked else p / q * advantage) + 2 * 0.3 * log_ratio) / 100
        assert float(gradient[index]) == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert 5 < num_masked < 59
    assert outputs.sums["loss/trust_region_masked/frac"] == num_masked
    assert inputs.entropies.grad is not None
    torch.testing.assert_close(inputs.entropies.grad, torch.full((64,), -0.05 / 100, dtype=torch.float64))


@pytest.mark.parametrize(
    ("now", "then", "advantage", "is_masked"),
    [
        pytest.param(0.6, 0.3, 1.0, True, id="risen, still pulled up"),
        pytest.param(0.45, 0.3, 1.0, False, id="risen a little"),
        pytest.param(0.1, 0.6, 1.0, False, id="fallen, pulled back up"),
        pytest.param(0.1, 0.6, -1.0, True, id="fallen, still pushed down"),
        pytest.param(0.5, 0.6, -1.0, False, id="fallen a little"),
        pytest.param(0.6, 0.3, -1.0, False, id="risen, pushed back down"),
        pytest.param(1e-2, 1e-5, 1.0, False, id="a rare token may rise a thousandfold"),
        pytest.param(0.9, 0.1, 0.0, False, id="no advantage is not masked, it is zero"),
    ],
)
def test_the_mask_is_on_the_side_that_goes_too_far(now: float, then: float, advantage: float, is_masked: bool) -> None:
    inputs = make_inputs(now=[now], then=[then], advantages=[advantage])
    outputs = policy_gradient(inputs)
    assert outputs.sums["loss/trust_region_masked/frac"] == is_masked
    assert float(logprob_gradient(outputs, inputs)) == pytest.approx(0.0 if is_masked else -advantage * now / then)


def test_both_bounds_are_used_on_their_own_side() -> None:
    inputs = make_inputs(now=[0.5, 0.5], then=[0.3, 0.7], advantages=[1.0, -1.0])
    assert policy_gradient(inputs, max_prob_increase=0.1).sums["loss/trust_region_masked/frac"] == 1
    assert policy_gradient(inputs, max_prob_decrease=0.1).sums["loss/trust_region_masked/frac"] == 1
    assert policy_gradient(inputs, max_prob_increase=0.3, max_prob_decrease=0.3).sums["loss/policy"] != 0


def test_on_policy_the_loss_is_minus_the_mean_advantage() -> None:
    inputs = make_inputs(now=[0.2, 0.5, 0.9], then=[0.2, 0.5, 0.9], advantages=[1.0, -0.5, 0.25])
    outputs = policy_gradient(inputs)
    assert float(outputs.loss.detach()) == pytest.approx(-0.25)
    assert outputs.sums["loss/mismatch_kl/mean"] == 0
    assert outputs.sums["loss/importance_ratio/mean"] == 3
    torch.testing.assert_close(logprob_gradient(outputs, inputs), -inputs.advantages / 3)


def test_mismatch_kl_is_ratio_minus_log_ratio_minus_one() -> None:
    inputs = make_inputs(now=[0.2, 0.5], then=[0.4, 0.5], advantages=[0.0, 0.0])
    outputs = policy_gradient(inputs)
    assert outputs.sums["loss/mismatch_kl/mean"] == pytest.approx(0.5 - math.log(0.5) - 1)
    assert outputs.maxima["loss/mismatch_kl/max"] == pytest.approx(0.5 - math.log(0.5) - 1)
    assert outputs.maxima["loss/importance_ratio/max"] == pytest.approx(1.0)


def test_a_tiny_mismatch_is_not_lost_to_rounding() -> None:
    # In float32, exp(1e-5) - 1 - 1e-5 would be noise of 1e-8; the answer is 5e-11.
    inputs = LossInputs(
        trainer_logprobs=torch.tensor([1e-5]),
        inference_logprobs=torch.tensor([0.0]),
        advantages=torch.tensor([0.0]),
        entropies=torch.tensor([0.0]),
        num_loss_tokens=1,
    )
    assert policy_gradient(inputs).sums["loss/mismatch_kl/mean"] == pytest.approx(5e-11, rel=1e-3)


def test_the_entropy_bonus_lowers_the_loss() -> None:
    inputs = make_inputs(now=[0.2, 0.5], then=[0.2, 0.5], advantages=[0.0, 0.0])
    outputs = policy_gradient(inputs, entropy_bonus=0.1)
    assert float(outputs.loss.detach()) == pytest.approx(-0.1 * 2.0)
    assert outputs.sums["loss/entropy/mean"] / 2 == 2.0


@pytest.mark.parametrize("loss", [policy_gradient, cross_entropy])
def test_two_halves_sum_to_the_whole(loss: Any) -> None:
    columns: dict[str, Any] = {
        "now": [0.2, 0.5, 0.9, 0.3, 0.7],
        "then": [0.25, 0.4, 0.85, 0.6, 0.1],
        "advantages": [1.0, -0.5, 0.25, 2.0, -1.0],
    }
    whole = loss(make_inputs(**columns))
    halves = [
        loss(make_inputs(**{name: values[part] for name, values in columns.items()}, num_loss_tokens=5))
        for part in (slice(0, 2), slice(2, 5))
    ]
    assert float(whole.loss.detach()) == pytest.approx(sum(float(half.loss.detach()) for half in halves), rel=1e-12)
    for key, value in whole.sums.items():
        assert value == pytest.approx(sum(half.sums[key] for half in halves), rel=1e-12)
    for key, value in whole.maxima.items():
        assert value == max(half.maxima[key] for half in halves)


def test_cross_entropy_is_the_mean_negative_logprob() -> None:
    inputs = make_inputs(now=[0.5, 0.25], then=[1.0, 1.0], advantages=[1.0, 1.0], num_loss_tokens=4)
    outputs = cross_entropy(inputs)
    assert float(outputs.loss.detach()) == pytest.approx(math.log(8) / 4)
    torch.testing.assert_close(logprob_gradient(outputs, inputs), torch.full((2,), -0.25, dtype=torch.float64))
    assert outputs.sums["loss/cross_entropy/mean"] == pytest.approx(math.log(8))


def test_losses_do_not_change_their_inputs() -> None:
    inputs = make_inputs(now=[0.2, 0.5], then=[0.4, 0.5], advantages=[1.0, -1.0])
    before = {name: getattr(inputs, name).detach().clone() for name in LossInputs.__struct_fields__[:4]}
    policy_gradient(inputs, log_ratio_penalty=0.1, entropy_bonus=0.1)
    assert all(torch.equal(getattr(inputs, name), value) for name, value in before.items())
