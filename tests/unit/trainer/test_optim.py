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
