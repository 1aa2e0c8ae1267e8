"""`model_type` -> family. The only place that lists what is known; adapters are imported when asked for."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from latepix.errors import ConfigError

if TYPE_CHECKING:
    from latepix.families.base import Adapter


class Family(msgspec.Struct, frozen=True):
    """What is known of a family without torch.

    Attributes:
        model_type: Hugging Face's name.
        adapter: `module:Class` of its adapter.
        renderer: name of its renderer in the `renderers` package.
        stop_tokens: tokens that end a turn.
        media_tokens: placeholder tokens; the first one is the picture's.
    """

    model_type: str
    adapter: str
    renderer: str
    stop_tokens: tuple[str, ...]
    media_tokens: tuple[str, ...]


_FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Make a family known, from here or from another package."""
    _FAMILIES[family.model_type] = family


def family_of(model_type: str, *, where: Path | str = "model") -> Family:
    """Return the family of a model type.

    Raises:
        ConfigError: it is unknown; lists the known ones.
    """
    if model_type not in _FAMILIES:
        raise ConfigError(
            f"{where}: model_type {model_type!r} is not a known family. Known: {', '.join(sorted(_FAMILIES))}. "
            "To add one, write an adapter (latepix/families/base.py says what it must do) and call "
            "latepix.families.registry.register_family before the run."
        )
    return _FAMILIES[model_type]


def get_adapter(model_type: str) -> Adapter:
    """Return the adapter of a model type (imports torch).

    Raises:
        ConfigError: the model type is unknown.
    """
    module, _, name = family_of(model_type).adapter.partition(":")
    return getattr(importlib.import_module(module), name)()


register_family(
    Family(
        model_type="qwen3_vl",
        adapter="latepix.families.qwen_vl:QwenVLAdapter",
        renderer="qwen3-vl",
        stop_tokens=("<|im_end|>", "<|endoftext|>"),
        media_tokens=("<|image_pad|>", "<|video_pad|>"),
    )
)
