"""The Qwen-VL family: `pixel_values` as flat patches, `image_grid_thw`, 3-axis MRoPE positions.

Source of the classes: transformers `models/qwen3_vl/modeling_qwen3_vl.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from latepix.errors import CheckpointError, ConfigError, PlaceholderMismatch
from latepix.families.base import ForwardPolicy, ProcessedImage
from latepix.families.model_info import ModelInfo

#: What Hugging Face reports when weights and config do not fit each other; it would go on all the same.
_LOADING_PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys")


class QwenVLAdapter:
    """Adapter of `qwen3_vl`."""

    forward_policy = ForwardPolicy(positions="mrope", layouts=("packed", "padded"))

    def load_model(self, path: Path, *, dtype: torch.dtype, device: str) -> PreTrainedModel:
        """Load the model of a folder, in eval mode, with sdpa attention.

        Raises:
            ConfigError: it is incomplete, damaged or of another shape than its config says.
        """
        try:
            # With the loading info, `from_pretrained` returns a pair, which its annotation does not say.
            loaded: Any = AutoModelForImageTextToText.from_pretrained(
                path, dtype=dtype, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
            )
            model, loading = loaded
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise ConfigError(f"Cannot load the model in {path} (model.path): {error}") from error
        wrong = {kind: sorted(map(str, loading[kind])) for kind in _LOADING_PROBLEMS if loading.get(kind)}
        if wrong:
            # Hugging Face would fill what is missing with random numbers, others in every process.
            kinds = "; ".join(
                f"{len(names)} {kind.replace('_', ' ')} ({names[0]}, ...)" for kind, names in wrong.items()
            )
            raise ConfigError(
                f"The weights in {path} (model.path) are not those of its config.json: {kinds}. Download the model "
                "again."
            )
        return model.to(device).eval()

    def load_processor(self, path: Path) -> Qwen2VLImageProcessorPil:
        """Load the PIL image processor; it needs no torchvision."""
        return Qwen2VLImageProcessorPil.from_pretrained(path, local_files_only=True)

    def process_image(self, processor: Qwen2VLImageProcessorPil, picture: Image.Image) -> ProcessedImage:
        """Run the image processor on one RGB picture."""
        output = processor(images=[picture], return_tensors="pt")
        t, h, w = (int(n) for n in output["image_grid_thw"][0])
        merge = int(processor.merge_size)
        return ProcessedImage(
            pixel_values=output["pixel_values"], grid_thw=(t, h, w), num_tokens=t * h * w // (merge * merge)
        )

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

    def encode_images(self, model: PreTrainedModel, images: Sequence[ProcessedImage]) -> Any:
        """Run the vision tower once over distinct pictures.

        Returns:
            Hugging Face's output with `pooler_output` and `deepstack_features`, split by picture.
        """
        device = next(model.parameters()).device
        pixel_values = torch.cat([image.pixel_values for image in images]).to(device)
        grids = torch.tensor([image.grid_thw for image in images], device=device)
        return _inner(model).get_image_features(pixel_values, grids, return_dict=True)

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
        """Return the last hidden states [B, S, D]; every slot gets the features of its picture."""
        features = None
        if encoded is not None:
            features = {"image": _scatter(encoded, slot_images)}
        output = _inner(model)(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            cache=cache,
            use_cache=cache is not None,
            mm_encoder_outputs=features,
        )
        return output.last_hidden_state

    def lm_head(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] of hidden states [..., D]."""
        return model.get_output_embeddings()(hidden)

    def hub_state_dict(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Return the weights as `save_pretrained` names them; a tied output layer is left out."""
        tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        return tensors

    def load_hub_state_dict(self, model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
        """Copy weights in hub layout into the model, all or nothing."""
        own = self.hub_state_dict(model)
        missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
        shapes = [name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape]
        if missing or unknown or shapes:
            raise CheckpointError(
                f"The weights do not fit the model: missing {missing[:3]}, unknown {unknown[:3]}, other shape "
                f"{sorted(shapes)[:3]} ({len(missing)}, {len(unknown)} and {len(shapes)} in all)."
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])


def _inner(model: PreTrainedModel) -> Any:
    """Return the model below the output layer; its class is another one in every family."""
    return model.base_model


def _scatter(encoded: Any, slot_images: Sequence[int]) -> Any:
    """Give every slot its picture's features; autograd sums the gradients of slots that share a picture."""
    return type(encoded)(
        pooler_output=[encoded.pooler_output[index] for index in slot_images],
        deepstack_features=[[level[index] for index in slot_images] for level in encoded.deepstack_features],
    )
