"""A run's loss settings -> its loss: one of ours by name, or anybody's by import path."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from latepix.config.losses import LossConfig
from latepix.errors import ConfigError, TrainerError
from latepix.trainer.loss import (
    LossInputs,
    LossOutputs,
    TokenLoss,
    TokenTerms,
    cispo,
    grpo_clip,
    gspo,
    policy_loss,
    trust_region,
)

Loss = Callable[[LossInputs], LossOutputs]
_OURS: dict[str, Callable[..., TokenTerms]] = {
    "trust_region": trust_region,
    "grpo_clip": grpo_clip,
    "cispo": cispo,
    "gspo": gspo,
}


def loss_of(config: LossConfig) -> Loss:
    """Return the policy loss with a run's settings.

    A custom loss `module:function` is called as `function(inputs: LossInputs, **args)` and returns [N], one term per
    trained token with gradient, not yet divided by anything; weights, entropy bonus and reference KL come on top.

    Raises:
        ConfigError: the custom loss cannot be imported.
    """
    ours = _OURS.get(config.type)
    terms: TokenLoss
    if ours is None:
        terms = functools.partial(_custom_terms, _import(config.type), config.type, config.args)
    else:
        terms = functools.partial(ours, **config.settings)

    def loss(inputs: LossInputs) -> LossOutputs:
        return policy_loss(
            inputs,
            terms(inputs),
            denominator=config.denominator_or_default,
            entropy_bonus=config.entropy_bonus,
            kl_weight=config.kl_weight,
        )

    return loss


def _import(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        # The module is the user's: whatever it raises, the setting has to be named.
        raise ConfigError(
            f"trainer.loss.type: {place!r} cannot be imported ({type(error).__name__}: {error}). Wanted "
            "module:function of a module on the Python path."
        ) from error
    if not callable(function):
        raise ConfigError(f"trainer.loss.type: {place!r} is a {type(function).__name__}, wanted a function.")
    return function


def _custom_terms(function: Callable[..., Any], name: str, args: dict[str, Any], inputs: LossInputs) -> TokenTerms:
    """Call somebody's loss and check what it returns.

    Raises:
        TrainerError: it is not [N] with a gradient.
    """
    values = function(inputs, **args)
    wanted = tuple(inputs.trainer_logprobs.shape)
    if not isinstance(values, torch.Tensor):
        raise TrainerError(
            f"trainer.loss.type: {name} returned a {type(values).__name__}, wanted a tensor of shape {wanted}: one "
            "term for each trained token."
        )
    if tuple(values.shape) != wanted:
        raise TrainerError(
            f"trainer.loss.type: {name} returned shape {tuple(values.shape)}, wanted {wanted}: one term for each "
            "trained token, neither summed nor divided (latepix does that, over the whole batch)."
        )
    if not values.requires_grad:
        raise TrainerError(
            f"trainer.loss.type: {name} returned a tensor without gradient: nothing in it depends on trainer_logprobs "
            "or entropies, or it was detached."
        )
    return TokenTerms(values=values, is_clipped=torch.zeros_like(values, dtype=torch.bool))
