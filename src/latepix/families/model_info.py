"""The facts of a model folder that matter outside the model: special ids, picture grid, lengths. Needs no torch.

Read by the orchestrator (what may be sampled, how large a picture becomes), the local engine and the trainer (the
same ban list on both sides of the importance ratio).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from latepix.errors import ConfigError
from latepix.trace.ingress import GridFit, InlineImage, PaddedGridFit
from latepix.trace.refs import PlaceholderRange, expand_placeholders


class ModelInfo(msgspec.Struct, frozen=True):
    """What a model folder says about itself.

    Attributes:
        path: the folder.
        model_type: Hugging Face's name of the family.
        vocab_size: rows of the output layer.
        max_position_embeddings: longest sequence, tokens.
        image_placeholder_id: the id that a picture's tokens carry.
        placeholder_ids: ids that stand for any medium.
        banned_ids: ids that are never sampled: media placeholders, every other special that does not end a turn, and
            ids behind the tokenizer's last token.
        stop_ids: ids that end a turn.
        grid: the picture sizes the processor leaves alone.
        merge_size: patches that become one token, per side.
    """

    path: Path
    model_type: str
    vocab_size: int
    max_position_embeddings: int
    image_placeholder_id: int
    placeholder_ids: tuple[int, ...]
    banned_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    grid: GridFit
    merge_size: int

    def max_len(self, max_model_len: int) -> int:
        """Return the longest sequence of a run, in tokens: as set, but never longer than the model's positions."""
        return min(max_model_len, self.max_position_embeddings)

    def num_image_tokens(self, image: InlineImage) -> int:
        """Return how many placeholder tokens the picture takes."""
        width, height = self.grid.processed_size(image.width, image.height)
        return (width // self.grid.factor) * (height // self.grid.factor)

    def expand(
        self, token_ids: Sequence[int], images: Iterable[InlineImage]
    ) -> tuple[list[int], list[PlaceholderRange]]:
        """Expand a logical prompt by the sizes of its pictures, as a server must do it.

        Returns:
            The expanded ids, and where each picture landed.
        Raises:
            PlaceholderMismatch: the number of placeholders is not the number of pictures.
        """
        return expand_placeholders(token_ids, [self.num_image_tokens(image) for image in images], self.placeholder_ids)


class KimiPictureSettings(msgspec.Struct, frozen=True):
    """How Kimi K2.5 turns a picture into patches.

    Attributes:
        patch_size: pixels per side of a patch.
        merge_size: patches that become one token, per side.
        max_patches: of a picture.
        max_side_patches: of its longer side.
        image_mean, image_std: of the three channels, of values in [0, 1].
    """

    patch_size: Annotated[int, msgspec.Meta(gt=0)]
    merge_size: Annotated[int, msgspec.Meta(gt=0)]
    max_patches: Annotated[int, msgspec.Meta(gt=0)]
    max_side_patches: Annotated[int, msgspec.Meta(gt=0)]
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]

    def grid(self) -> tuple[GridFit, int]:
        """Return the sizes that its processor leaves alone, and the merge size."""
        factor = self.patch_size * self.merge_size
        grid = PaddedGridFit(
            factor=factor,
            min_pixels=factor**2,
            max_pixels=self.max_patches * self.patch_size**2,
            patch=self.patch_size,
            max_patches=self.max_patches,
            max_side_patches=self.max_side_patches,
        )
        return grid, self.merge_size


def read_model_info(path: Path) -> ModelInfo:
    """Read the facts of a model folder.

    Raises:
        ConfigError: the folder or a file is missing or not what it should be.
    """
    from latepix.families.registry import family_of

    config = _read_json(path, "config.json")
    model_type = str(config.get("model_type"))
    family = family_of(model_type, where=path / "config.json")
    tokenizer = _read_json(path, "tokenizer.json")
    grid, merge_size = _read_grid(path, model_type)
    try:
        text = config.get("text_config", config)
        vocab_size = int(text["vocab_size"])
        max_position_embeddings = int(text.get("max_position_embeddings", 1 << 30))
        added = tokenizer.get("added_tokens", [])
        ids = {entry["content"]: int(entry["id"]) for entry in added}
        specials = {int(entry["id"]) for entry in added if entry.get("special")}
        num_tokens = 1 + max([*tokenizer["model"]["vocab"].values(), *ids.values()])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} (model.path): config.json or tokenizer.json lacks vocab_size, added_tokens or the vocabulary "
            f"({type(error).__name__}: {error}). Wanted the files as the hub has them; download the model again."
        ) from error
    missing = [token for token in (*family.stop_tokens, *family.media_tokens) if token not in ids]
    if missing:
        raise ConfigError(f"{path / 'tokenizer.json'} lacks the special tokens {missing} of family {model_type}.")
    stop_ids = tuple(ids[token] for token in family.stop_tokens)
    placeholder_ids = tuple(ids[token] for token in family.media_tokens)
    banned_ids = (specials - set(stop_ids)) | set(placeholder_ids) | set(range(num_tokens, vocab_size))
    return ModelInfo(
        path=path,
        model_type=model_type,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        image_placeholder_id=placeholder_ids[0],
        placeholder_ids=placeholder_ids,
        banned_ids=tuple(sorted(banned_ids)),
        stop_ids=stop_ids,
        grid=grid,
        merge_size=merge_size,
    )


def _read_grid(path: Path, model_type: str) -> tuple[GridFit, int]:
    if model_type == "kimi_k25":
        return kimi_picture_settings(path).grid()
    settings = _picture_settings(path)
    size = settings.get("size") or {}
    low = size.get("shortest_edge", settings.get("min_pixels"))
    high = size.get("longest_edge", settings.get("max_pixels"))
    try:
        merge_size = int(settings["merge_size"])
        factor = int(settings["patch_size"]) * merge_size
        grid = GridFit(factor=factor, min_pixels=int(low), max_pixels=int(high))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: the image processor's settings lack patch_size, merge_size or the pixel limits "
            "(size.shortest_edge, size.longest_edge)."
        ) from error
    vision = _read_json(path, "config.json").get("vision_config") or {}
    wanted = int(vision.get("patch_size", 0)) * int(vision.get("spatial_merge_size", 0))
    if factor < 1 or grid.max_pixels < factor * factor or (wanted and factor != wanted):
        raise ConfigError(
            f"{path}: the image processor's patch_size x merge_size is {factor}, at most {grid.max_pixels} pixels; the "
            f"model's config.json has {wanted}. The processor's settings are not those of the model."
        )
    return grid, merge_size


def kimi_picture_settings(path: Path) -> KimiPictureSettings:
    """Read how Kimi's pictures are processed, under the hub's names or under Hugging Face's.

    The hub keeps them in `media_proc_cfg`, which Hugging Face's class does not read: it would take its defaults.

    Raises:
        ConfigError: a setting is missing or makes no sense.
    """
    settings = _picture_settings(path)
    media = settings.get("media_proc_cfg") or {}
    size = settings.get("size") or {}
    values = {
        "patch_size": media.get("patch_size", settings.get("patch_size")),
        "merge_size": media.get("merge_kernel_size", settings.get("merge_size")),
        "max_patches": media.get("in_patch_limit", settings.get("max_patches")),
        "max_side_patches": media.get("patch_limit_on_one_side", size.get("max_height")),
        "image_mean": media.get("image_mean", settings.get("image_mean")),
        "image_std": media.get("image_std", settings.get("image_std")),
    }
    try:
        read = msgspec.convert(values, KimiPictureSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path}: the image processor's settings lack something of {', '.join(values)} ({error}). Wanted them in "
            "preprocessor_config.json (or processor_config.json), as the hub has them in media_proc_cfg."
        ) from error
    if (
        media
        and size
        and (read.max_patches, read.max_side_patches)
        != (
            settings.get("max_patches", read.max_patches),
            size.get("max_height", read.max_side_patches),
        )
    ):
        raise ConfigError(
            f"{path}: the image processor has two limits: media_proc_cfg allows {read.max_patches} patches, "
            f"{read.max_side_patches} on a side; max_patches is {settings.get('max_patches')}, size.max_height "
            f"{size.get('max_height')}. vLLM reads the first, Hugging Face the others; make them equal."
        )
    return read


def _picture_settings(path: Path) -> dict[str, Any]:
    if (path / "preprocessor_config.json").exists():
        return _read_json(path, "preprocessor_config.json")
    return _read_json(path, "processor_config.json").get("image_processor", {})


def _read_json(path: Path, name: str) -> dict[str, Any]:
    if not path.is_dir():
        raise ConfigError(
            f"Model folder {path} does not exist (model.path). Download a model, or make a tiny one with "
            f"`latepix tiny --family qwen3_vl {path}`."
        )
    try:
        content = json.loads((path / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"Model folder {path} has no {name}; it must be a complete Hugging Face folder with tokenizer and image "
            "processor."
        ) from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise ConfigError(f"{path / name} is not JSON: {error}.") from error
    except OSError as error:
        raise ConfigError(f"{path / name} cannot be read: {error.strerror or error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path / name} holds a JSON {type(content).__name__}, wanted an object.")
    return content
