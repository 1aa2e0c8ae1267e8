"""AdamW, gradient clipping, and a learning rate that rises and falls linearly.

A model in bfloat16 is stepped through float32 copies of its weights: in bfloat16 itself, an update smaller than a
256th of a weight would be rounded away.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from latepix.config.schema import OptimConfig
from latepix.errors import NonFiniteLoss


def lr_factor(step: int, *, warmup_steps: int, total_steps: int, final_frac: float) -> float:
    """Return the learning rate of a step over its peak.

    Worked example with warmup 2, total 6, final 0.2: 0.5, 1.0, 1.0, 0.733, 0.467, 0.2.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    last = total_steps - 1
    if last <= warmup_steps:
        return 1.0
    return 1.0 - (1.0 - final_frac) * (step - warmup_steps) / (last - warmup_steps)


class Optimizer:
    """One optimizer step at a time."""

    def __init__(self, model: nn.Module, config: OptimConfig, *, total_steps: int) -> None:
        self._config = config
        self._total_steps = total_steps
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # A float32 parameter is its own master.
        self._masters = [
            parameter if parameter.dtype == torch.float32 else nn.Parameter(parameter.detach().float())
            for parameter in self._parameters
        ]
        for parameter, master in self._copies():
            parameter.register_post_accumulate_grad_hook(functools.partial(_hand_over, master))
        self._adamw = torch.optim.AdamW(
            self._masters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )

    def clear(self) -> None:
        """Forget gradients: a step that was refused half-way leaves some behind."""
        for tensor in (*self._parameters, *self._masters):
            tensor.grad = None

    def step(self, step: int) -> dict[str, float]:
        """Clip the gradients, take a step, clear the gradients.

        Raises:
            NonFiniteLoss: the gradient is NaN or infinite, and the weights unchanged; or the step made them so.
        """
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self._config.max_grad_norm)
        if not torch.isfinite(norm):
            raise NonFiniteLoss(
                f"Step {step}: the gradient's norm is {float(norm)}. The step was refused and its batch kept; lower "
                "trainer.optim.lr or look at the batch's rewards and logprobs."
            )
        factor = lr_factor(
            step,
            warmup_steps=self._config.warmup_steps,
            total_steps=self._total_steps,
            final_frac=self._config.final_lr_frac,
        )
        for group in self._adamw.param_groups:
            group["lr"] = self._config.lr * factor
        self._adamw.step()
        if not all(bool(torch.isfinite(norm)) for norm in torch._foreach_norm([*self._masters])):
            raise NonFiniteLoss(
                f"Step {step}: the weights are not finite after the step: training diverged. Lower trainer.optim.lr "
                f"({self._config.lr:g})."
            )
        self._adamw.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, master in self._copies():
                parameter.copy_(master)
        return {"optim/grad_norm": float(norm), "optim/lr": self._config.lr * factor}

    def _copies(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return the parameters that have a master beside them, with it."""
        pairs = zip(self._parameters, self._masters, strict=True)
        return [(parameter, master) for parameter, master in pairs if master is not parameter]


def _hand_over(master: nn.Parameter, parameter: torch.Tensor) -> None:
    """Add a gradient that was just made to the master's: summed in bfloat16, micro batches would lose digits."""
    gradient = parameter.grad
    if gradient is not None:
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None
