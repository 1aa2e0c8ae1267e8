"""Tiny random checkpoints of the real Hugging Face classes: the laptop's stand-in for a hub download.

`make_tiny(family, out)` writes a complete model folder in the hub's layout: config and random weights of the real
class, a byte-level BPE tokenizer trained on the spot with every special token the family's renderer asks for, a chat
template, and the image processor's settings. Same seed, same bytes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from latepix.errors import ConfigError
from latepix.families.registry import get_adapter
from latepix.families.tiny_configs import TinySize, complete_config, tiny_config, write_processor
from latepix.families.tiny_tokenizer import write_tokenizer
from latepix.transport.files import write_folder

if TYPE_CHECKING:
    from torch import nn

#: Every family of ours has a tiny model.
TINY_FAMILIES = ("kimi_k25", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")


def make_tiny(family: str, out: Path, *, seed: int = 0, size: TinySize | None = None) -> Path:
    """Write a tiny random model folder.

    Args:
        family: `model_type` of the family.
        out: folder to write; must not exist or be empty.
        seed: of the random weights.
        size: shape of the model; None takes the defaults.
    Returns:
        `out`.
    Raises:
        ConfigError: the family is unknown, or `out` already holds something.
        TransportError: the disk refused; nothing is left behind.
    """
    if family not in TINY_FAMILIES:
        raise ConfigError(f"--family: no tiny model for family {family!r}. Known: {', '.join(TINY_FAMILIES)}.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists and is not an empty folder; choose another one or remove it.")
    return write_folder(out, lambda folder: _write(family, folder, seed, size or TinySize()))


def _write(family: str, out: Path, seed: int, size: TinySize) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForImageTextToText

    ids = write_tokenizer(family, out, size.vocab_tokens)
    write_processor(family, out, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(tiny_config(family, size, ids))
        _let_layers_remember(model)
    end, padding = ("<|im_end|>", "[PAD]") if family == "kimi_k25" else ("<|im_end|>", "<|endoftext|>")
    model.generation_config.eos_token_id = [ids[end], ids["[EOS]" if family == "kimi_k25" else padding]]
    model.generation_config.pad_token_id = ids[padding]
    model.save_pretrained(out)
    # What `save_pretrained` writes is not the hub's layout in every family.
    tensors = get_adapter(family).hub_state_dict(model)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, out / "model.safetensors", metadata={"format": "pt"})
    complete_config(family, out)


def _let_layers_remember(model: nn.Module) -> None:
    """Start linear attention as its authors do: steps log-uniform in [0.001, 0.1] (Mamba-2, arXiv 2405.21060).

    Hugging Face's class starts with steps of softplus(1) = 1.3 and rates up to 16, under which a state fades to e^-10
    within one token: such a layer is blind to all but the last token, and its gates' gradients are rounding errors.
    """
    import torch
    from torch import nn

    for module in model.modules():
        bias = getattr(module, "dt_bias", None)
        if isinstance(bias, nn.Parameter):
            low, high = math.log(1e-3), math.log(0.1)
            steps = torch.exp(low + (high - low) * torch.rand(bias.shape))
            bias.data.copy_(steps.expm1().log())
