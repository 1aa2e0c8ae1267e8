"""Kimi K2.5: patches of [3, 14, 14], one grid per picture, plain one-axis rope, a DeepSeek-V3 text model.

Source of the classes: transformers `models/kimi_k25/modeling_kimi_k25.py` and `models/deepseek_v3/`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from latepix.errors import CheckpointError, ConfigError, PlaceholderMismatch
from latepix.families.base import ForwardPolicy
from latepix.families.hugging_face import HuggingFaceAdapter, Tensors
from latepix.families.model_info import ModelInfo, kimi_picture_settings

#: Names that Hugging Face's own way back does not bring back to the hub's.
_RENAMED = (
    ("language_model.model.blocks.", "language_model.model.layers."),
    ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
    ("model.mm_projector.", "mm_projector."),
)


class KimiLayout:
    """The hub has other names, one matrix for q, k and v of the vision tower, and every expert by itself."""

    def check(self, config: Any) -> None:
        """Let every model pass."""

    def to_hub(self, model: PreTrainedModel, tensors: Tensors) -> Tensors:
        """Return new tensors in hub layout."""
        converted = revert_weight_conversion(model, tensors)
        hub: Tensors = {}
        for name, tensor in converted.items():
            for ours, theirs in _RENAMED:
                name = theirs + name.removeprefix(ours) if name.startswith(ours) else name
            hub[name] = tensor
        return hub

    def from_hub(self, model: PreTrainedModel, tensors: Tensors) -> Tensors:
        """Return new tensors in the class's layout, through Hugging Face's own loading."""
        loaded: Any = type(model).from_pretrained(
            None,
            config=copy.deepcopy(model.config),
            state_dict=tensors,
            dtype=model.dtype,
            output_loading_info=True,
        )
        other, loading = loaded
        wrong = {kind: sorted(map(str, names))[:3] for kind, names in loading.items() if names}
        if wrong:
            raise CheckpointError(f"The weights are not those of a {model.config.model_type}: {wrong}.")
        return other.state_dict()


class KimiK25Adapter(HuggingFaceAdapter):
    """Adapter of `kimi_k25`."""

    forward_policy = ForwardPolicy(positions="rope", layouts=("packed", "padded"), takes_mm_token_type_ids=False)
    hub_layout = KimiLayout()

    def __init__(self, model_type: str = "kimi_k25") -> None:
        del model_type

    def load_processor(self, path: Path) -> Any:
        """Load the image processor with the folder's settings, wherever they stand in it.

        Raises:
            ConfigError: torchvision, the only backend that Hugging Face has for it, is not installed.
        """
        try:
            from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
        except ImportError as error:
            raise ConfigError(
                f"The image processor of kimi_k25 needs torchvision: pip install 'latepix[kimi]' ({error})."
            ) from error
        settings = kimi_picture_settings(path)
        side = settings.max_side_patches
        return Kimi_K25ImageProcessor(
            patch_size=settings.patch_size,
            merge_size=settings.merge_size,
            max_patches=settings.max_patches,
            size={"max_height": side, "max_width": side},
            image_mean=list(settings.image_mean),
            image_std=list(settings.image_std),
        )

    def position_ids(
        self, mm_token_type_ids: np.ndarray, grids: Sequence[tuple[int, int, int]], info: ModelInfo
    ) -> np.ndarray:
        """Return [1, T] int64 positions of one sample: 0, 1, 2, ..., pictures included.

        Raises:
            PlaceholderMismatch: the grids need another number of picture tokens than there are.
        """
        needed = sum(t * h * w // info.merge_size**2 for t, h, w in grids)
        found = int(np.count_nonzero(mm_token_type_ids))
        if needed != found:
            raise PlaceholderMismatch(
                f"{len(grids)} grids with merge {info.merge_size} need {needed} picture tokens, the sample has {found}."
            )
        return np.arange(len(mm_token_type_ids), dtype=np.int64)[None]

    def forward_hidden(
        self,
        model: PreTrainedModel,
        *,
        input_ids: Any,
        position_ids: Any,
        encoded: Any = None,
        slot_images: Sequence[int] = (),
        attention_mask: Any = None,
        cache: Any = None,
    ) -> Any:
        """Return the last hidden states [B, S, D]; every slot gets the features of its picture."""
        return super().forward_hidden(
            model,
            input_ids=input_ids,
            position_ids=position_ids[0],
            encoded=encoded,
            slot_images=slot_images,
            attention_mask=attention_mask,
            cache=cache,
        )
