"""Lets torchvision be imported beside a CPU build of torch, where its own wheel is linked against CUDA.

torchvision declares how two operators of its C++ library behave on meta tensors, and that fails where the library could
not be loaded. So the operators are declared, without code, just before torchvision is imported. What vLLM and
transformers use of it (resizing pictures) is plain torch. A `.pth` file imports this in every process, so nothing heavy
may be imported at the top.
"""

import sys

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
#: Declarations live as long as the object that made them.
_declared = []


class BeforeTorchvision:
    """An import hook that finds nothing, but hears of the import first."""

    def find_spec(self, name, path=None, target=None):
        """Declare the operators when torchvision is asked for; the usual finders find it."""
        if name == "torchvision" and not _declared:
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            _declared.append(library)
            for schema in _SCHEMAS:
                library.define(schema)


sys.meta_path.insert(0, BeforeTorchvision())
