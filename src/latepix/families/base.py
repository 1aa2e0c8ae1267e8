"""What an adapter must do: the whole difference between model families, as the engine and the trainer see it.

An adapter turns a picture into processed pixels and a grid, a grid into a number of tokens, token types and grids into
position ids, and hands encoded pictures to the model's forward. It never looks at token ids to find pictures: where
they sit comes from references.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedModel

from latepix.families.model_info import ModelInfo


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a config value."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


class ForwardPolicy(msgspec.Struct, frozen=True):
    """How a family's forward may be called.

    Attributes:
        positions: `mrope` (3 axes: t, h, w) or `rope` (1 axis).
        layouts: how several samples may share a forward without leaking into each other: `packed` (one row, samples
            told apart by positions that restart) and `padded` (one row each, padded on the right).
        takes_mm_token_type_ids: whether Hugging Face's forward takes them. We give positions instead, which say more.
        is_recurrent: some layers carry a state from token to token. What stands on the right of a row changes nothing,
            as everywhere; but a state taken behind padding would have seen it, so prompts that are to be continued
            are padded on the left, under an attention mask.
        context_parallel: what cutting a sequence over ranks has to wait for: `after_vision_merge` (then tokens,
            positions and deepstack features are cut alike), or `refused`: a layer needs the whole sequence.
    """

    positions: Literal["mrope", "rope"]
    layouts: tuple[Literal["packed", "padded"], ...]
    takes_mm_token_type_ids: bool
    is_recurrent: bool = False
    context_parallel: Literal["after_vision_merge", "refused"] = "after_vision_merge"

    @property
    def num_axes(self) -> int:
        """Axes of a position: 3 or 1."""
        return 3 if self.positions == "mrope" else 1


class ProcessedImage(msgspec.Struct, frozen=True):
    """One picture after the family's image processor.

    Attributes:
        pixel_values: [t*h*w, ...] float32, normalized patches: flat (Qwen) or [3, 14, 14] (Kimi).
        grid_thw: patches along time, height and width.
        num_tokens: placeholder tokens it fills.
    """

    pixel_values: torch.Tensor
    grid_thw: tuple[int, int, int]
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        """Size of the pixels in bytes."""
        return self.pixel_values.numel() * self.pixel_values.element_size()


class Adapter(Protocol):
    """One family."""

    forward_policy: ForwardPolicy

    def load_model(self, path: Path, *, dtype: torch.dtype, device: str, attention: str = "sdpa") -> PreTrainedModel:
        """Load the Hugging Face class of the family, in eval mode.

        Args:
            path: the model folder, in hub layout.
            dtype: of the weights.
            device: such as `cpu` or `cuda`.
            attention: Hugging Face's name of the attention implementation.
        Raises:
            ConfigError: the folder is incomplete, damaged, or not what its config says.
        """
        ...

    def load_processor(self, path: Path) -> Any:
        """Load the image processor of a model folder."""
        ...

    def process_image(self, processor: Any, picture: Image.Image) -> ProcessedImage:
        """Run the image processor on one RGB picture."""
        ...

    def position_ids(
        self, mm_token_type_ids: np.ndarray, grids: Sequence[tuple[int, int, int]], info: ModelInfo
    ) -> np.ndarray:
        """Return [A, T] int64 positions of one sample (A = 3 for mrope, 1 for rope).

        Args:
            mm_token_type_ids: [T] 0 text, 1 picture.
            grids: one per slot, in order.
            info: the model folder's facts.
        """
        ...

    def encode_images(self, model: PreTrainedModel, images: Sequence[ProcessedImage]) -> Any:
        """Run the vision tower once over distinct pictures; the result is opaque to the caller."""
        ...

    def forward_hidden(
        self,
        model: PreTrainedModel,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        encoded: Any = None,
        slot_images: Sequence[int] = (),
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
    ) -> torch.Tensor:
        """Return the last hidden states [B, S, D].

        Args:
            model: from `load_model`.
            input_ids: [B, S] int64.
            position_ids: [A, B, S]; for packed rows with a first extra axis of text positions that restart.
            encoded: from `encode_images`, None if no slot is in these tokens.
            slot_images: index into the encoded pictures of every slot, row by row.
            attention_mask: [B, S_cache + S] of 0 and 1, or None for plain causal attention (in a packed row: within
                each sample).
            cache: a Hugging Face cache, filled in place; None for none.
        """
        ...

    def lm_head(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] of hidden states [..., D]."""
        ...

    def hub_state_dict(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Return the weights under the names and layouts of the family's hub checkpoints, tied ones once."""
        ...

    def load_hub_state_dict(self, model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
        """Copy weights in hub layout into the model; all or nothing.

        Raises:
            CheckpointError: a name is unknown or missing, or a shape differs.
        """
        ...
