from __future__ import annotations

import pytest
import torch
from torch import nn

from latepix.config.schema import OptimConfig
from latepix.errors import NonFiniteLoss
from latepix.trainer.optim import Optimizer, lr_factor


def make_model() -> nn.Linear:
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).reshape(2, 3))
    return model


def test_the_worked_example_of_the_schedule() -> None:
    factors = [lr_factor(step, warmup_steps=2, total_steps=6, final_frac=0.2) for step in range(6)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 0.7333, 0.4667, 0.2], abs=1e-4)


@pytest.mark.parametrize(
    ("warmup_steps", "total_steps", "final_frac", "wanted"),
    [
        (0, 4, 1.0, [1, 1, 1, 1]),
        (0, 3, 0.0, [1, 0.5, 0]),
        (0, 1, 0.1, [1]),
        (4, 4, 0.1, [0.25, 0.5, 0.75, 1]),
        (3, 4, 0.1, [1 / 3, 2 / 3, 1, 1]),
    ],
)
def test_edges_of_the_schedule(warmup_steps: int, total_steps: int, final_frac: float, wanted: list[float]) -> None:
    factors = [
        lr_factor(step, warmup_steps=warmup_steps, total_steps=total_steps, final_frac=final_frac)
        for step in range(total_steps)
    ]
    assert factors == pytest.approx(wanted)


def test_a_step_clips_moves_and_clears() -> None:
    model = make_model()
    optimizer = Optimizer(model, OptimConfig(lr=0.1, warmup_steps=2, max_grad_norm=1.0), total_steps=10)
    before = model.weight.detach().clone()
    model.weight.grad = torch.full((2, 3), -10.0)
    values = optimizer.step(0)
    assert values == {"optim/grad_norm": pytest.approx(10 * 6**0.5), "optim/lr": pytest.approx(0.05)}
    # The first step of Adam moves every weight by the learning rate, whatever the gradient's size.
    torch.testing.assert_close(model.weight.detach(), before + 0.05, atol=1e-5, rtol=0)
    assert model.weight.grad is None


def test_gradients_are_clipped_to_the_largest_norm() -> None:
    one, other = make_model(), make_model()
    for model, scale in ((one, 5.0), (other, 500.0)):
        optimizer = Optimizer(model, OptimConfig(lr=0.1, max_grad_norm=1.0), total_steps=10)
        for step in range(3):
            model.weight.grad = scale * torch.arange(1.0, 7.0).reshape(2, 3)
            optimizer.step(step)
    torch.testing.assert_close(one.weight, other.weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_refused(value: float) -> None:
    model = make_model()
    optimizer = Optimizer(model, OptimConfig(lr=0.1), total_steps=10)
    model.weight.grad = torch.ones(2, 3)
    optimizer.step(0)
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones(2, 3)
    model.weight.grad[1, 2] = value
    with pytest.raises(NonFiniteLoss, match=r"Step 7: the gradient's norm is (nan|inf).*trainer\.optim\.lr"):
        optimizer.step(7)
    assert torch.equal(model.weight, before)


def test_a_float32_model_has_no_copies() -> None:
    model = make_model()
    assert Optimizer(model, OptimConfig(), total_steps=1)._masters[0] is model.weight


def pull(model: nn.Linear, gradient: torch.Tensor) -> None:
    """Let a backward pass give the weight this gradient."""
    (model.weight * gradient.to(model.weight.dtype)).sum().backward()


def test_gradients_of_bfloat16_backward_passes_are_summed_in_float32() -> None:
    model = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    optimizer = Optimizer(model, OptimConfig(), total_steps=1)
    for _ in range(1000):
        pull(model, torch.ones(2, 3))
    # In bfloat16 the sum stops at 256: the next one would be 257, which has too many digits.
    torch.testing.assert_close(optimizer._masters[0].grad, torch.full((2, 3), 1000.0))
    assert model.weight.grad is None
    optimizer.clear()
    assert optimizer._masters[0].grad is None


def test_updates_too_small_for_bfloat16_add_up() -> None:
    model = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = Optimizer(model, OptimConfig(lr=1e-4), total_steps=1000)
    # Neighbours of 1 in bfloat16 lie 2^-8 below and 2^-7 above: a step of 1e-4 is rounded away, 100 are not.
    assert torch.equal(model.weight + 1e-4, model.weight)
    for step in range(100):
        pull(model, torch.full((2, 3), -1.0))
        optimizer.step(step)
    torch.testing.assert_close(model.weight.float(), torch.full((2, 3), 1 + 2**-7))


def test_a_bfloat16_model_is_the_rounded_float32_one() -> None:
    exact, rounded = make_model(), make_model().to(torch.bfloat16)
    config = OptimConfig(lr=3e-3, weight_decay=0.1, max_grad_norm=1.0, warmup_steps=3)
    optimizers = [Optimizer(model, config, total_steps=20) for model in (exact, rounded)]
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        gradient = torch.randn(2, 3, generator=generator).bfloat16()
        pull(exact, gradient)
        pull(rounded, gradient)
        one, other = (optimizer.step(step) for optimizer in optimizers)
        assert one == other
        assert torch.equal(rounded.weight, exact.weight.bfloat16())
    assert not torch.equal(exact.weight, exact.weight.bfloat16().float())
    assert rounded.weight.dtype == torch.bfloat16
    assert rounded.weight.grad is None


def test_a_parameter_without_a_gradient_stays_beside_one_that_moves() -> None:
    model = nn.Linear(3, 2, bias=True, dtype=torch.bfloat16)
    optimizer = Optimizer(model, OptimConfig(lr=1.0), total_steps=10)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    pull(model, torch.ones(2, 3))
    optimizer.step(0)
    assert torch.equal(model.bias, bias)
    assert not torch.equal(model.weight, weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_refused_step_leaves_a_bfloat16_model_and_its_next_step_alone(value: float) -> None:
    model, untouched = make_model().to(torch.bfloat16), make_model().to(torch.bfloat16)
    optimizers = [Optimizer(one, OptimConfig(lr=0.1), total_steps=10) for one in (model, untouched)]
    before = model.weight.detach().clone()
    gradient = torch.ones(2, 3)
    gradient[1, 2] = value
    pull(model, gradient)
    with pytest.raises(NonFiniteLoss, match="Step 0: the gradient's norm is"):
        optimizers[0].step(0)
    assert torch.equal(model.weight, before)
    for one, optimizer in zip((model, untouched), optimizers, strict=True):
        optimizer.clear()
        pull(one, torch.ones(2, 3))
        optimizer.step(0)
    assert torch.equal(model.weight, untouched.weight)
    assert not torch.equal(model.weight, before)
