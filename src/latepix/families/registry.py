"""`model_type` -> family. The only place that lists what is known; adapters are imported when asked for."""

from __future__ import annotations

import importlib
from importlib import metadata
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
        adapter: `module:Class` of its adapter; made with the model type as its one argument.
        renderer: how its conversations become tokens (`inference/render.py`): one of the names there, or
            `module:function` of a function (tokenizer) -> a renderer with the methods of the `renderers` package.
        stop_tokens: tokens that end a turn.
        media_tokens: placeholder tokens; the first one is the picture's.
    """

    model_type: str
    adapter: str
    renderer: str
    stop_tokens: tuple[str, ...]
    media_tokens: tuple[str, ...]


_FAMILIES: dict[str, Family] = {}
#: Where other packages name a `Family` or a list of them: `my_type = "my_package.families:MY_FAMILY"`.
ENTRY_POINTS = "latepix.adapters"


def register_adapter(family: Family) -> None:
    """Make a family known, from here or from another package, in this process.

    A run has several processes: a package that is to be known in all of them declares its families under the entry
    point group `latepix.adapters` instead, and they are found when they are asked for.
    """
    _FAMILIES[family.model_type] = family


def family_of(model_type: str, *, where: Path | str = "model") -> Family:
    """Return the family of a model type.

    Raises:
        ConfigError: it is unknown; lists the known ones.
    """
    if model_type not in _FAMILIES:
        _load_entry_points()
    if model_type not in _FAMILIES:
        raise ConfigError(
            f"{where}: model_type {model_type!r} is not a known family. Known: {', '.join(sorted(_FAMILIES))}. "
            "To add one, write an adapter (latepix/families/base.py says what it must do) and name it under the entry "
            f"point group {ENTRY_POINTS!r}, or call latepix.families.registry.register_adapter in each process."
        )
    return _FAMILIES[model_type]


def _load_entry_points() -> None:
    """Register the families of installed packages.

    Raises:
        ConfigError: one cannot be imported, or is no family.
    """
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        try:
            found = entry.load()
        except Exception as error:
            # It is other people's code: whatever it raises, the run cannot go on, and the package has to be named.
            raise ConfigError(f"The adapter {entry.name} = {entry.value!r} cannot be imported: {error}") from error
        families = found if isinstance(found, list | tuple) else [found]
        for family in families:
            if not isinstance(family, Family):
                raise ConfigError(
                    f"The adapter {entry.name} = {entry.value!r} is a {type(family).__name__}, wanted a "
                    "latepix.families.registry.Family or a list of them."
                )
            register_adapter(family)


def known_families() -> list[str]:
    """Return the model types that are known, sorted."""
    return sorted(_FAMILIES)


def get_adapter(model_type: str) -> Adapter:
    """Return the adapter of a model type (imports torch).

    Raises:
        ConfigError: the model type is unknown, or its adapter cannot be imported.
    """
    place = family_of(model_type).adapter
    module, _, name = place.partition(":")
    try:
        adapter = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"The adapter of {model_type}, {place!r}, cannot be imported: {error}") from error
    return adapter(model_type)


_QWEN_STOPS = ("<|im_end|>", "<|endoftext|>")
_QWEN_MEDIA = ("<|image_pad|>", "<|video_pad|>")
_QWEN_RENDERERS = {
    "qwen2_5_vl": "qwen2.5-vl",
    "qwen3_vl": "qwen3-vl",
    "qwen3_vl_moe": "qwen3-vl",
    "qwen3_5": "qwen3.5",
    "qwen3_5_moe": "qwen3.5",
}
for _model_type, _renderer in _QWEN_RENDERERS.items():
    register_adapter(
        Family(
            model_type=_model_type,
            adapter="latepix.families.qwen_vl:QwenVLAdapter",
            renderer=_renderer,
            stop_tokens=_QWEN_STOPS,
            media_tokens=_QWEN_MEDIA,
        )
    )
register_adapter(
    Family(
        model_type="kimi_k25",
        adapter="latepix.families.kimi_k25:KimiK25Adapter",
        renderer="kimi-k2.5",
        stop_tokens=("<|im_end|>", "[EOS]"),
        media_tokens=("<|media_pad|>", "<|kimi_k25_video_placeholder|>"),
    )
)
