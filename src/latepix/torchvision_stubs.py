"""Lets torchvision be imported beside a build of torch that its own wheel was not linked against.

The wheel on PyPI is linked against CUDA. Beside a CPU build of torch its C++ library cannot be loaded, and its import
ends at operators that the library would have defined ("operator torchvision::nms does not exist"), although resizing
pictures, which is all that image processors use, is plain torch. So these operators are declared, without code, just
before torchvision is imported. Nothing heavy is imported here, and a torchvision that loads its library is left alone.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class BeforeTorchvision:
    """A finder that finds nothing, but hears of torchvision's import first; see `install`."""

    def __init__(self) -> None:
        self._library: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Declare the operators when torchvision is asked for; the usual finders find it."""
        if name == "torchvision" and self._library is None and _lacks_operators():
            import torch

            # Declarations live as long as the object that made them.
            self._library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in _SCHEMAS:
                self._library.define(schema)
        return None


def _lacks_operators() -> bool:
    """Return whether torchvision is installed and its C++ library cannot be loaded into this torch."""
    found = importlib.machinery.PathFinder.find_spec("torchvision")
    if found is None or not found.submodule_search_locations:
        return False
    import torch

    for folder in found.submodule_search_locations:
        for library in Path(folder).glob("_C.*"):
            try:
                torch.ops.load_library(str(library))
            except OSError:
                return True
            return False
    return True


def install() -> None:
    """Declare what is missing from now on; calling it again changes nothing."""
    if not any(isinstance(finder, BeforeTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, BeforeTorchvision())
