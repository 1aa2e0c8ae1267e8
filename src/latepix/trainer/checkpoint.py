"""Weights on disk: safetensors in the family's hub layout, alone (for the server) or as a whole model folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file
from transformers import PreTrainedModel

from latepix.families.base import Adapter
from latepix.transport.files import write_bytes, write_folder

#: Files of a model folder that are not weights and go along unchanged.
_NOT_WEIGHTS = ("*.json", "*.jinja", "*.txt", "*.model")


def write_weights(folder: Path, model: PreTrainedModel, adapter: Adapter) -> None:
    """Write `model.safetensors` into an existing folder."""
    tensors = {name: tensor.contiguous() for name, tensor in adapter.hub_state_dict(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def export_model(source: Path, out: Path, model: PreTrainedModel, adapter: Adapter) -> Path:
    """Write a plain Hugging Face folder: the weights, and tokenizer, processor and config of the source folder.

    Args:
        source: the folder the model was loaded from.
        out: replaced if it exists.
        model, adapter: what to write.
    Returns:
        `out`.
    Raises:
        TransportError: the disk refused.
    """

    def write(folder: Path) -> None:
        for pattern in _NOT_WEIGHTS:
            for file in source.glob(pattern):
                if not file.name.endswith(".index.json"):
                    shutil.copyfile(file, folder / file.name)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
        write_bytes(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        write_weights(folder, model, adapter)

    return write_folder(out, write)
