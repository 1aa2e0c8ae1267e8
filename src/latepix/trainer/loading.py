"""A model folder -> a model that is ready to be trained: kernel, layout and activation checkpointing."""

from __future__ import annotations

import importlib.util

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from latepix.config.schema import ModelConfig, TrainStepConfig
from latepix.errors import ConfigError
from latepix.families.base import Adapter, torch_dtype
from latepix.trainer.forward import check_layout

#: The package a kernel comes in.
_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def load_for_training(
    adapter: Adapter, model: ModelConfig, trainer: TrainStepConfig, *, device: str
) -> PreTrainedModel:
    """Load a model with the run's attention kernel.

    Raises:
        ConfigError: the model cannot be loaded, or a kernel or layout is not to be had.
    """
    check_layout(trainer.layout, adapter.forward_policy, family=f"the family of {model.path}")
    check_attention(trainer.attention, device)
    return adapter.load_model(model.path, dtype=torch_dtype(model.dtype), device=device, attention=trainer.attention)


def check_attention(attention: str, device: str) -> None:
    """Refuse an attention kernel that this machine does not have.

    Raises:
        ConfigError: says what is missing.
    """
    if attention == "sdpa":
        return
    if device == "cpu":
        raise ConfigError(f"trainer.attention: {attention!r} needs a GPU and there is none here. Use 'sdpa'.")
    package = _PACKAGES.get(attention)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"trainer.attention: {attention!r} needs the package {package}, which is not installed. Install it, or "
            "use 'sdpa' or 'flex_attention'."
        )


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let every layer keep its input only, and compute itself again in the backward.

    Hugging Face does so in training mode, which would switch dropout on too: only the layers' own flag is set, not
    their children's.
    """
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
