"""The Qwen-VL families: `pixel_values` as flat patches, `image_grid_thw`, 3-axis MRoPE positions.

Source of the classes: transformers `models/{qwen2_5_vl,qwen3_vl,qwen3_vl_moe,qwen3_5,qwen3_5_moe}/modeling_*.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from latepix.errors import ConfigError, PlaceholderMismatch
from latepix.families.base import ForwardPolicy
from latepix.families.hugging_face import HubLayout, HuggingFaceAdapter, SameLayout, Tensors
from latepix.families.model_info import ModelInfo


def _hybrid() -> ForwardPolicy:
    """Return the policy of families with linear attention.

    Its plain torch code knows no borders between samples: a packed row would leak. The kernels for GPUs know them.
    """
    has_kernels = torch.cuda.is_available() and all(find_spec(name) for name in ("fla", "causal_conv1d"))
    return ForwardPolicy(
        positions="mrope",
        layouts=("packed", "padded") if has_kernels else ("padded",),
        takes_mm_token_type_ids=True,
        is_recurrent=True,
        context_parallel="refused",
    )


#: Attention only: a packed row is told apart by text positions that restart.
_ATTENTION = ForwardPolicy(positions="mrope", layouts=("packed", "padded"), takes_mm_token_type_ids=True)
_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


class TransposedExperts:
    """The hub has the experts of `qwen3_vl_moe` as [E, in, out], the class as [E, out, in]."""

    def check(self, config: Any) -> None:
        """Refuse sizes at which the two layouts look alike: Hugging Face would guess, and guess wrong.

        Raises:
            ConfigError: an expert's matrix is square.
        """
        text = config.get_text_config()
        hidden, expert = text.hidden_size, text.moe_intermediate_size
        if hidden in (expert, 2 * expert):
            raise ConfigError(
                f"The experts of this {config.model_type} have square matrices (hidden_size {hidden}, "
                f"moe_intermediate_size {expert}), so that Hugging Face cannot tell the hub's layout from its own and "
                "loads them transposed. Choose a moe_intermediate_size that is neither hidden_size nor half of it."
            )

    def to_hub(self, model: PreTrainedModel, tensors: Tensors) -> Tensors:
        """Return the tensors with transposed experts."""
        return {name: tensor.transpose(1, 2) if name.endswith(_EXPERTS) else tensor for name, tensor in tensors.items()}

    def from_hub(self, model: PreTrainedModel, tensors: Tensors) -> Tensors:
        """Return the tensors with transposed experts: the same again."""
        return self.to_hub(model, tensors)


#: model_type -> how its forward may be called, and how its checkpoints are laid out.
_FAMILIES: dict[str, tuple[ForwardPolicy, HubLayout]] = {
    "qwen2_5_vl": (_ATTENTION, SameLayout({"model.visual.": "visual.", "model.language_model.": "model."})),
    "qwen3_vl": (_ATTENTION, SameLayout()),
    "qwen3_vl_moe": (_ATTENTION, TransposedExperts()),
    "qwen3_5": (_hybrid(), SameLayout()),
    # Hugging Face writes one tensor for every expert; the hub has them stacked, as the class.
    "qwen3_5_moe": (_hybrid(), SameLayout()),
}


class QwenVLAdapter(HuggingFaceAdapter):
    """Adapter of `qwen2_5_vl`, `qwen3_vl`, `qwen3_vl_moe`, `qwen3_5` and `qwen3_5_moe`."""

    def __init__(self, model_type: str = "qwen3_vl") -> None:
        self.forward_policy, self.hub_layout = _FAMILIES[model_type]

    def load_processor(self, path: Path) -> Qwen2VLImageProcessorPil:
        """Load the PIL image processor; it needs no torchvision."""
        return Qwen2VLImageProcessorPil.from_pretrained(path, local_files_only=True)

    def position_ids(
        self, mm_token_type_ids: np.ndarray, grids: Sequence[tuple[int, int, int]], info: ModelInfo
    ) -> np.ndarray:
        """Return [3, T] int64 MRoPE positions (t, h, w) of one sample.

        Text advances all axes by one. A picture at position p takes (p, p + row, p + column) of its merged grid, and
        the text after it goes on at p + max(rows, columns).

        Raises:
            PlaceholderMismatch: the runs of picture tokens do not fit the grids.
        """
        merge = info.merge_size
        positions = np.empty((3, len(mm_token_type_ids)), dtype=np.int64)
        at = position = slot = 0
        runs = np.flatnonzero(np.diff(mm_token_type_ids, prepend=mm_token_type_ids[:1] ^ 1, append=2))
        for start, end in itertools.pairwise(runs):
            if not mm_token_type_ids[start]:
                positions[:, start:end] = np.arange(position, position + end - start)
                position += end - start
                continue
            # Pictures that touch form one run of tokens: take slots until the run is used up.
            at = int(start)
            while at < end:
                if slot == len(grids):
                    raise PlaceholderMismatch(f"{end - at} picture tokens at {at} have no grid ({len(grids)} grids).")
                t, h, w = grids[slot]
                rows, columns = h // merge, w // merge
                length = t * rows * columns
                if at + length > end:
                    raise PlaceholderMismatch(
                        f"Slot {slot}: grid {(t, h, w)} with merge {merge} needs {length} tokens, the run has "
                        f"{end - at}."
                    )
                axes = np.indices((t, rows, columns)).reshape(3, length)
                positions[:, at : at + length] = axes + position
                position += max(rows, columns)
                at += length
                slot += 1
        if slot != len(grids):
            raise PlaceholderMismatch(f"{len(grids)} grids, but picture tokens for {slot}.")
        return positions

    def row_arguments(self, position_ids: torch.Tensor) -> dict[str, Any]:
        """Return where samples begin in a packed row, for the kernels of linear attention.

        Without the kernels, Hugging Face refuses them: nothing can leak in silence.
        """
        if not self.forward_policy.is_recurrent or len(position_ids) == 3:
            return {}
        is_start = position_ids[0, 0] == 0
        starts = torch.nonzero(is_start)[:, 0]
        ends = starts.new_tensor([is_start.numel()])
        borders = torch.cat([starts, ends]).int()
        longest = int(borders.diff().max())
        return {
            "cu_seq_lens_q": borders,
            "cu_seq_lens_k": borders,
            "max_length_q": longest,
            "max_length_k": longest,
            "seq_idx": (is_start.int().cumsum(0, dtype=torch.int32) - 1)[None],
        }
