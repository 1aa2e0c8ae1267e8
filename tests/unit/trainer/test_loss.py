"""The losses against derivatives by hand, in float64."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from latepix.trainer.loss import (
    LossInputs,
    LossOutputs,
    TokenLoss,
    cispo,
    cross_entropy,
    grpo_clip,
    gspo,
    policy_loss,
    trust_region,
)

SETTINGS: dict[str, Any] = {"max_prob_increase": 0.2, "max_prob_decrease": 0.2}


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


def policy_gradient(inputs: LossInputs, *, entropy_bonus: float = 0.0, **changes: Any) -> LossOutputs:
    return policy_loss(inputs, trust_region(inputs, **(SETTINGS | changes)), entropy_bonus=entropy_bonus)


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
    assert outputs.sums["loss/clipped/frac"] == num_masked
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
    assert outputs.sums["loss/clipped/frac"] == is_masked
    assert float(logprob_gradient(outputs, inputs)) == pytest.approx(0.0 if is_masked else -advantage * now / then)


def test_both_bounds_are_used_on_their_own_side() -> None:
    inputs = make_inputs(now=[0.5, 0.5], then=[0.3, 0.7], advantages=[1.0, -1.0])
    assert policy_gradient(inputs, max_prob_increase=0.1).sums["loss/clipped/frac"] == 1
    assert policy_gradient(inputs, max_prob_decrease=0.1).sums["loss/clipped/frac"] == 1
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


#: Each loss with settings under which tokens lie on both sides of every bound.
LOSSES: dict[str, TokenLoss] = {
    "trust_region": functools.partial(trust_region, **SETTINGS, log_ratio_penalty=0.3, importance_cap=1.3),
    "grpo_clip": functools.partial(grpo_clip, clip_low=0.2, clip_high=0.28, dual_clip=1.6),
    "cispo": functools.partial(cispo, clip_low=0.3, clip_high=0.4),
    "gspo": functools.partial(gspo, clip_low=0.1, clip_high=0.15),
}


def random_columns(count: int = 60, num_samples: int = 12) -> dict[str, Any]:
    """Draw tokens whose ratios reach from about 0.2 to 5, in samples of different lengths, in float64."""
    generator = torch.Generator().manual_seed(3)
    logprobs = torch.empty(count, dtype=torch.float64).uniform_(-3, -0.05, generator=generator)
    return {
        "trainer_logprobs": logprobs,
        "inference_logprobs": logprobs + 0.5 * torch.randn(count, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(count, generator=generator, dtype=torch.float64),
        "entropies": torch.rand(count, generator=generator, dtype=torch.float64),
        "sample_ids": torch.randint(num_samples, (count,), generator=generator).sort().values,
        "reference_logprobs": logprobs + 0.3 * torch.randn(count, generator=generator, dtype=torch.float64),
    }


def whole_loss(columns: dict[str, Any], terms: TokenLoss, **how: Any) -> LossOutputs:
    fixed: dict[str, Any] = {"num_loss_tokens": 100, "num_loss_samples": 20}
    inputs = LossInputs(**(fixed | columns))
    return policy_loss(inputs, terms(inputs), **how)


@pytest.mark.parametrize("denominator", ["tokens", "samples"])
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cispo"])
def test_gradients_equal_finite_differences(name: str, denominator: str) -> None:
    # Not CISPO, which is not the derivative of its value, nor a capped ratio: their gradients are checked by hand.
    terms = (
        functools.partial(trust_region, **SETTINGS, log_ratio_penalty=0.3) if name == "trust_region" else LOSSES[name]
    )
    columns = random_columns()

    def loss(logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        changed = columns | {"trainer_logprobs": logprobs, "entropies": entropies}
        return whole_loss(changed, terms, denominator=denominator, entropy_bonus=0.05, kl_weight=0.4).loss

    # Steps of 1e-6 cross no bound: the nearest ratio is further away than that, or this would fail.
    assert torch.autograd.gradcheck(
        loss, (columns["trainer_logprobs"].requires_grad_(), columns["entropies"].requires_grad_()), atol=1e-8
    )


def test_a_capped_ratio_keeps_its_direction() -> None:
    inputs = make_inputs(now=[0.9, 0.5, 0.9], then=[0.1, 0.4, 0.1], advantages=[2.0, 2.0, -3.0])
    outputs = policy_gradient(inputs, max_prob_increase=1.0, importance_cap=1.5)
    torch.testing.assert_close(
        logprob_gradient(outputs, inputs), torch.tensor([-1.5 * 2, -1.25 * 2, 1.5 * 3], dtype=torch.float64) / 3
    )
    assert outputs.sums["loss/policy"] == pytest.approx(-3.0 - 2.5 + 4.5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        pytest.param(1.1, 1.0, -1.1, -1.1, id="inside"),
        pytest.param(1.5, 1.0, -1.28, 0.0, id="risen too far, pulled up"),
        pytest.param(1.5, -1.0, 1.5, 1.5, id="risen too far, pushed down"),
        pytest.param(0.5, 1.0, -0.5, -0.5, id="fallen too far, pulled up"),
        pytest.param(0.5, -1.0, 0.8, 0.0, id="fallen too far, pushed down"),
        pytest.param(5.0, -2.0, 6.0, 0.0, id="beyond the dual clip"),
    ],
)
def test_grpo_clips_each_side_by_itself(ratio: float, advantage: float, value: float, slope: float) -> None:
    inputs = make_inputs(now=[0.1 * ratio], then=[0.1], advantages=[advantage])
    terms = grpo_clip(inputs, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert float(terms.values.detach()) == pytest.approx(value)
    assert bool(terms.is_clipped) == (slope == 0.0)
    assert float(logprob_gradient(policy_loss(inputs, terms), inputs)) == pytest.approx(slope)


def test_cispo_keeps_a_clipped_tokens_gradient() -> None:
    inputs = make_inputs(now=[0.5, 0.1, 0.2], then=[0.1, 0.4, 0.2], advantages=[1.0, 1.0, -2.0])
    outputs = policy_loss(inputs, cispo(inputs, clip_low=0.5, clip_high=1.0))
    torch.testing.assert_close(
        logprob_gradient(outputs, inputs), torch.tensor([-2.0, -0.5, 2.0], dtype=torch.float64) / 3
    )
    assert outputs.sums["loss/clipped/frac"] == 2


def test_gspo_has_one_ratio_for_a_sample() -> None:
    # Ratios 2 and 1/2 of the first sample make 1; of the second, 2 makes 2 and is clipped to 1.5.
    inputs = LossInputs(
        trainer_logprobs=torch.tensor([0.4, 0.1, 0.2], dtype=torch.float64).log().requires_grad_(),
        inference_logprobs=torch.tensor([0.2, 0.2, 0.1], dtype=torch.float64).log(),
        advantages=torch.tensor([3.0, 3.0, 1.0], dtype=torch.float64),
        entropies=torch.zeros(3, dtype=torch.float64),
        num_loss_tokens=3,
        sample_ids=torch.tensor([0, 0, 1]),
        num_loss_samples=2,
    )
    outputs = policy_loss(inputs, gspo(inputs, clip_low=0.5, clip_high=0.5), denominator="samples")
    assert float(outputs.loss.detach()) == pytest.approx(-(3.0 + 1.5) / 2)
    torch.testing.assert_close(
        logprob_gradient(outputs, inputs), torch.tensor([-0.75, -0.75, 0.0], dtype=torch.float64)
    )


def test_the_reference_kl_is_never_negative_and_pulls_back() -> None:
    columns = random_columns()
    columns["trainer_logprobs"].requires_grad_()
    zero = functools.partial(trust_region, max_prob_increase=1.0, max_prob_decrease=1.0)
    outputs = whole_loss(columns | {"advantages": torch.zeros(60, dtype=torch.float64)}, zero, kl_weight=1.0)
    outputs.loss.backward()
    gaps = columns["reference_logprobs"] - columns["trainer_logprobs"].detach()
    torch.testing.assert_close(columns["trainer_logprobs"].grad, (1 - gaps.exp()) / 100)
    assert outputs.sums["loss/reference_kl/mean"] == pytest.approx(float((gaps.exp() - 1 - gaps).sum()))
    assert float((gaps.exp() - 1 - gaps).min()) >= 0


@pytest.mark.parametrize("denominator", ["tokens", "samples"])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_the_sum_of_its_micro_batches(name: str, denominator: str) -> None:
    columns = random_columns()
    first = columns["sample_ids"] < 5
    whole = whole_loss(columns, LOSSES[name], denominator=denominator, kl_weight=0.2)
    halves = [
        whole_loss(
            {key: values[part] for key, values in columns.items()}, LOSSES[name], denominator=denominator, kl_weight=0.2
        )
        for part in (first, ~first)
    ]
    assert float(whole.loss) == pytest.approx(sum(float(half.loss) for half in halves), rel=1e-12)
    for key, value in whole.sums.items():
        assert value == pytest.approx(sum(half.sums[key] for half in halves), rel=1e-12), key


def test_with_samples_as_denominator_a_long_sample_counts_as_much_as_a_short_one() -> None:
    inputs = LossInputs(
        trainer_logprobs=torch.zeros(4),
        inference_logprobs=torch.zeros(4),
        advantages=torch.ones(4),
        entropies=torch.zeros(4),
        num_loss_tokens=4,
        sample_ids=torch.tensor([0, 0, 0, 2]),
        num_loss_samples=2,
    )
    torch.testing.assert_close(inputs.weights("samples"), torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2]))
    torch.testing.assert_close(inputs.weights("tokens"), torch.full((4,), 0.25))
