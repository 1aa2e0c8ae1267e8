"""A folder of safetensors, opened and compared with another before a model is touched; knows nothing of vLLM.

Goes in: a folder as the trainer publishes it, or a model folder. Comes out: its names and shapes at once, its tensors
on demand. Open folders are memory maps: the files may be deleted or replaced by a rename, the tensors stay readable.
Files must not be rewritten in place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

#: Suffixes of weights that are read by unpickling, which runs code.
_PICKLED = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})
#: Most names that an error lists of each kind.
_NUM_NAMED = 3


class WeightFolderError(ValueError):
    """A folder of weights cannot be served; says which file or tensor, and why."""


class WeightFolder:
    """The open safetensors files of one folder.

    Attributes:
        path: the folder, absolute.
        shapes: name -> shape of every tensor.
    """

    def __init__(self, path: Path) -> None:
        """Open a folder.

        Args:
            path: with `model.safetensors.index.json` the files that it lists are read, otherwise every `*.safetensors`.
        Raises:
            WeightFolderError: no such folder, no such files, a file that is no safetensors file or is cut off, or one
                name in two files.
        """
        self.path = path.absolute()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}
        if not self.path.is_dir():
            raise WeightFolderError(
                f"Weights folder {self.path}: there is no such folder on the machine of the inference server. "
                "Server and trainer must see the same file system."
            )
        with ExitStack() as opened:
            for file in _weight_files(self.path):
                self._open(file, opened)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the files."""
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._opened.close()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every name with its tensor, on the CPU, file by file."""
        for name, file in self._files.items():
            yield name, file.get_tensor(name)

    def _open(self, path: Path, opened: ExitStack) -> None:
        try:
            file = opened.enter_context(safe_open(path, framework="pt", device="cpu"))
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            size = f"{path.stat().st_size} bytes" if path.is_file() else "not a file"
            # The name stands apart from the folder: vLLM's API replaces most paths in errors by "<path>".
            raise WeightFolderError(
                f"Weights folder {self.path}: {path.name} ({size}) is not a whole safetensors file: {error}. It may be "
                "cut off, of another format, or not completely written; nothing else is read."
            ) from error
        if twice := sorted(shapes.keys() & self.shapes.keys()):
            raise WeightFolderError(f"Weights folder {self.path}: {twice[0]} is in {path.name} and in another file.")
        self.shapes |= shapes
        self._files |= dict.fromkeys(shapes, file)


def refuse_pickles(folder: Path) -> None:
    """Refuse a published folder in which pickled weights lie.

    Raises:
        WeightFolderError: names the file.
    """
    if pickled := sorted(file.name for file in folder.glob("*") if file.suffix in _PICKLED):
        raise WeightFolderError(
            f"Weights folder {folder}: {pickled[0]} is a pickle, and loading one runs its code. Publish "
            "*.safetensors only."
        )


def check_replaces(new: WeightFolder, served: WeightFolder, *, is_tied: bool) -> None:
    """Check that a folder holds the same tensors as the one being served.

    Args:
        new: weights to serve from now on.
        served: weights being served.
        is_tied: the output layer is the embedding, so that its own tensor is not read where it exists.
    Raises:
        WeightFolderError: a tensor is missing, unknown or of another shape.
    """
    missing = sorted(name for name in served.shapes.keys() - new.shapes.keys() if not _is_unread(name, is_tied))
    unknown = sorted(name for name in new.shapes.keys() - served.shapes.keys() if not _is_unread(name, is_tied))
    reshaped = sorted(
        name for name in new.shapes.keys() & served.shapes.keys() if new.shapes[name] != served.shapes[name]
    )
    if not (missing or unknown or reshaped):
        return
    shapes = [f"{name} (got {list(new.shapes[name])}, wanted {list(served.shapes[name])})" for name in reshaped]
    kinds = (("missing", missing), ("unknown", unknown), ("of another shape", shapes))
    found = "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds if names)
    raise WeightFolderError(
        f"Weights folder {new.path} does not hold the tensors of {served.path}, which is being served: {found}. "
        "Publish every tensor of the model, in the layout of its family's hub checkpoints."
    )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightFolderError(
                f"Weights index {index} is not readable: {type(error).__name__}: {error}."
            ) from error
        if outside := sorted(name for name in names if not isinstance(name, str) or Path(name).name != name):
            raise WeightFolderError(f"Weights index {index} lists {outside[0]!r}; only files beside it are read.")
        return sorted(folder / name for name in names)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        held = sorted(file.name for file in folder.glob("*"))
        raise WeightFolderError(
            f"Weights folder {folder} holds no *.safetensors, only {_some(held) if held else 'nothing'}. "
            "Nothing else is read."
        )
    return files


def _is_unread(name: str, is_tied: bool) -> bool:
    """Return whether vLLM does not read a tensor, so that it may be absent on either side."""
    parts = name.split(".")
    # Hub checkpoints of Qwen3.5 carry a draft model for speculative decoding, which Hugging Face's class has not.
    return parts[0] == "mtp" or (is_tied and parts[-2:] == ["lm_head", "weight"])


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")
