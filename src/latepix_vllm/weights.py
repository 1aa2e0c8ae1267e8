"""The weight-transfer backend `safetensors_dir`: the server loads a folder that the trainer published.

Goes in: `{"update_info": {"path": DIR}}`. What holds: an update that fails leaves the old weights serving, exactly,
and the server ready for the next one. So all of an update happens in `update_weights`, because that is the one call
after whose failure vLLM closes the session (`start_weight_update` works again); a failing `finish_weight_update` leaves
it open. The new folder is opened and compared with the one being served before the model is touched. Should loading
itself fail then, the weights are read again from the folder served before, whose files are kept open: the trainer may
have deleted it.

Limit: with several worker processes (tensor parallelism), vLLM's executor raises the first worker's error and leaves
the others' unread, so the next calls answer with them. Before an update that follows a failed one, call
`/init_weight_transfer_engine`, which does nothing here, until it answers 200.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from latepix_vllm.weight_files import WeightFolder, WeightFolderError, check_replaces, refuse_pickles

_log = logging.getLogger("vllm.latepix")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One update.

    Attributes:
        path: folder with `*.safetensors` in hub layout, as the server sees it.
    """

    path: str


class SafetensorsDirEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads safetensors folders into the worker's model, all or nothing.

    Raises:
        ValueError: the model was not loaded from safetensors, so that a failed update could not be undone.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._served = _open_served(vllm_config)
        self._is_tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        self._is_updated = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: the folder travels with each update."""

    def start_weight_update(self) -> None:
        """Begin an update; the model is not touched yet."""
        self._is_updated = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check and load one folder.

        Raises:
            ValueError: the folder cannot be served; nothing was touched.
            RuntimeError: loading failed; the old weights are back.
        """
        # The base class waits for an accelerator here, and fails where there is none.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check and load one folder, see `update_weights`."""
        path = update_info.path
        if not isinstance(path, str):
            raise ValueError(f'update_info must be {{"path": "<folder>"}}, got a path of type {type(path).__name__}.')
        new = self._open_new(Path(path))
        try:
            _reload(self.model, self.model_config, new)
        except BaseException as error:
            new.close()
            self._restore(new, error)
            raise RuntimeError(
                f"Loading the weights of {new.path} failed ({type(error).__name__}: {error}). The weights of "
                f"{self._served.path} are served again."
            ) from error
        self._served.close()
        self._served = new
        self._is_updated = True

    def finish_weight_update(self) -> None:
        """End the update.

        Raises:
            ValueError: nothing was loaded, so the weights may not be given a new version.
        """
        if not self._is_updated:
            raise ValueError(
                "This weight update has loaded nothing: call /update_weights before /finish_weight_update. (If it "
                "fails, the update is over, and /start_weight_update begins the next one.)"
            )
        self._is_updated = False

    def shutdown(self) -> None:
        """Release nothing: there is no connection, and the open files are what a failed update is undone from."""

    def _open_new(self, path: Path) -> WeightFolder:
        new = WeightFolder(path)
        try:
            refuse_pickles(new.path)
            check_replaces(new, self._served, is_tied=self._is_tied)
        except WeightFolderError:
            new.close()
            raise
        return new

    def _restore(self, new: WeightFolder, error: BaseException) -> None:
        """Serve the weights again that were served before a load that failed half-way."""
        _log.error("Loading the weights of %s failed, restoring %s", new.path, self._served.path, exc_info=error)
        try:
            _drop_unfinished(self.model, self.model_config)
            _reload(self.model, self.model_config, self._served)
        except BaseException as again:
            raise RuntimeError(
                f"Loading the weights of {new.path} failed ({type(error).__name__}: {error}), and so did going back to "
                f"{self._served.path} ({type(again).__name__}: {again}). The served weights are undefined: restart the "
                "inference server."
            ) from error


def _open_served(vllm_config: Any) -> WeightFolder:
    """Open the folder that the model was just loaded from."""
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    folder = Path(model_config.model)
    try:
        if not folder.is_dir():
            # A name on the hub: vLLM has just downloaded it, so it is found without the network.
            from huggingface_hub import snapshot_download

            folder = Path(
                snapshot_download(
                    model_config.model,
                    revision=model_config.revision,
                    cache_dir=load_config.download_dir,
                    local_files_only=True,
                )
            )
        return WeightFolder(folder)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The weight-transfer backend safetensors_dir undoes a failed update from the model's own safetensors, and "
            f"there are none for {model_config.model}: {error}"
        ) from error


def _reload(model: Any, model_config: Any, folder: WeightFolder) -> None:
    _forget_expert_kernels(model)
    initialize_layerwise_reload(model)
    model.load_weights(folder.tensors())
    finalize_layerwise_reload(model, model_config)
    _remake_output_layers(model)


def _remake_output_layers(model: torch.nn.Module) -> None:
    """Let an output layer that is tied to the embedding see its new weights on a CPU.

    There it computes with a copy that was packed when the model was loaded. No weights are loaded under its own name,
    so that vLLM does not pack it again: the new embedding would meet the old output layer.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if hasattr(layer, "cpu_linear") and hasattr(method, "tie_weights"):
            method.process_weights_after_loading(layer)


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """Let experts on a CPU be packed again.

    vLLM packs them for its CPU kernel when it makes that kernel, and not when weights are loaded under one that exists:
    it would compute with unpacked weights, and answer wrongly without an error. On a GPU the kernel has to stay, since
    CUDA graphs refer to it, and there is no such packing.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(layer.parameters()).device.type == "cpu":
            method.moe_kernel = None


def _drop_unfinished(model: torch.nn.Module, model_config: Any) -> None:
    """Give every layer that waits for weights its own tensors back.

    A load that fails leaves layers on the meta device, with the part of their weights that came. Started again in that
    state, a layer would count the old part and mix it with the new weights.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.load_numel = 0
        info.loaded_weights.clear()
    # vLLM puts back the kernel tensors of layers for which nothing was loaded.
    finalize_layerwise_reload(model, model_config)
