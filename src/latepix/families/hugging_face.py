"""What the adapters of all families share: loading a Hugging Face class, its vision outputs, its weights in hub layout.

The hub layout is what a family's published checkpoints have: names and shapes that vLLM reads. It is not always what
`save_pretrained` writes. `HubLayout` translates between it and the names of the class, both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from safetensors import SafetensorError
from transformers import AutoModelForImageTextToText, PreTrainedModel

from latepix.errors import CheckpointError, ConfigError
from latepix.families.base import ForwardPolicy, ProcessedImage

#: What Hugging Face reports when weights and config do not fit each other; it would go on all the same.
_LOADING_PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys")
Tensors = dict[str, torch.Tensor]


class HubLayout(Protocol):
    """Names and shapes of a family's published checkpoints."""

    def check(self, config: Any) -> None:
        """Refuse a model whose weights the libraries would read wrongly.

        Args:
            config: Hugging Face's, of the model.
        Raises:
            ConfigError: says which sizes are in the way.
        """
        ...

    def to_hub(self, model: PreTrainedModel, tensors: Tensors) -> Tensors:
        """Return the tensors of `model.state_dict()` under hub names; views where nothing but the name changes."""
        ...

    def from_hub(self, model: PreTrainedModel, tensors: Tensors) -> Tensors:
        """Return tensors in hub layout under the names of `model.state_dict()`."""
        ...


class SameLayout:
    """The hub has the names and shapes of the class, or names that differ in their beginning.

    Args:
        prefixes: beginnings of names in the class, and what the hub has in their place.
    """

    def __init__(self, prefixes: dict[str, str] | None = None) -> None:
        self._prefixes = prefixes or {}

    def check(self, config: Any) -> None:
        """Let every model pass."""

    def to_hub(self, model: PreTrainedModel, tensors: Tensors) -> Tensors:
        """Return the same tensors under hub names."""
        return {_renamed(name, self._prefixes): tensor for name, tensor in tensors.items()}

    def from_hub(self, model: PreTrainedModel, tensors: Tensors) -> Tensors:
        """Return the same tensors under the class's names."""
        back = {theirs: ours for ours, theirs in self._prefixes.items()}
        return {_renamed(name, back): tensor for name, tensor in tensors.items()}


class HuggingFaceAdapter:
    """The half of an adapter that does not depend on the family."""

    forward_policy: ForwardPolicy
    hub_layout: HubLayout

    def load_model(self, path: Path, *, dtype: torch.dtype, device: str, attention: str = "sdpa") -> PreTrainedModel:
        """Load the model of a folder, in eval mode; see `Adapter.load_model`."""
        try:
            # With the loading info, `from_pretrained` returns a pair, which its annotation does not say.
            loaded: Any = AutoModelForImageTextToText.from_pretrained(
                path, dtype=dtype, attn_implementation=attention, local_files_only=True, output_loading_info=True
            )
            model, loading = loaded
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
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
        self.hub_layout.check(model.config)
        return model.to(device).eval()

    def process_image(self, processor: Any, picture: Image.Image) -> ProcessedImage:
        """Run the image processor on one RGB picture."""
        output = processor(images=[picture], return_tensors="pt")
        t, h, w = (int(n) for n in output["image_grid_thw"][0])
        merge = int(processor.merge_size)
        return ProcessedImage(
            pixel_values=output["pixel_values"], grid_thw=(t, h, w), num_tokens=t * h * w // (merge * merge)
        )

    def encode_images(self, model: PreTrainedModel, images: Sequence[ProcessedImage]) -> Any:
        """Run the vision tower once over distinct pictures.

        Returns:
            Hugging Face's output; `pooler_output` (and `deepstack_features`, where there are any) split by picture.
        """
        device = next(model.parameters()).device
        pixel_values = torch.cat([image.pixel_values for image in images]).to(device)
        grids = torch.tensor([image.grid_thw for image in images], device=device)
        return inner(model).get_image_features(pixel_values, grids, return_dict=True)

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
        output = inner(model)(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            cache=cache,
            # With a cache, Hugging Face does not look for restarting positions: packed samples would see each other.
            use_cache=cache is not None,
            mm_encoder_outputs=None if encoded is None else {"image": scatter(encoded, slot_images)},
            **self.row_arguments(position_ids),
        )
        return output.last_hidden_state

    def row_arguments(self, position_ids: torch.Tensor) -> dict[str, Any]:
        """Return what else the model's forward has to be told about rows with these positions."""
        return {}

    def lm_head(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] of hidden states [..., D]."""
        return model.get_output_embeddings()(hidden)

    def hub_state_dict(self, model: PreTrainedModel) -> Tensors:
        """Return the weights in hub layout; a tied output layer is left out."""
        return self.hub_layout.to_hub(model, _own_tensors(model))

    def load_hub_state_dict(self, model: PreTrainedModel, tensors: Tensors) -> None:
        """Copy weights in hub layout into the model, all or nothing."""
        wanted = self.hub_state_dict(model)
        missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
        shapes = [name for name in wanted.keys() & tensors.keys() if wanted[name].shape != tensors[name].shape]
        if missing or unknown or shapes:
            raise CheckpointError(
                f"The weights do not fit the model: missing {missing[:3]}, unknown {unknown[:3]}, other shape "
                f"{sorted(shapes)[:3]} ({len(missing)}, {len(unknown)} and {len(shapes)} in all)."
            )
        own = _own_tensors(model)
        new = self.hub_layout.from_hub(model, tensors)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(new[name])


def inner(model: PreTrainedModel) -> Any:
    """Return the model below the output layer; its class is another one in every family."""
    return model.base_model


def scatter(encoded: Any, slot_images: Sequence[int]) -> Any:
    """Give every slot its picture's features; autograd sums the gradients of slots that share a picture.

    Args:
        encoded: from `encode_images`, N distinct pictures.
        slot_images: index in [0, N) for every slot.
    """
    features = {"pooler_output": [encoded.pooler_output[index] for index in slot_images]}
    deepstack = getattr(encoded, "deepstack_features", None)
    if deepstack is not None:
        features["deepstack_features"] = [[level[index] for index in slot_images] for level in deepstack]
    return type(encoded)(**features)


def _own_tensors(model: PreTrainedModel) -> Tensors:
    """Return the model's own memory by name, without an output layer that is the embedding."""
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors


def _renamed(name: str, prefixes: dict[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name
