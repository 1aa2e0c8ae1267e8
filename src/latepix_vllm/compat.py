"""Where vLLM keeps what the plugin uses: import paths move between 0.28 and 0.32, so they are resolved here only.

Nothing of vLLM is imported before one of the functions is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


class UnknownVllm(ImportError):
    """This vLLM keeps something at a place that the plugin does not know."""


def weight_transfer_factory() -> Any:
    """Return `WeightTransferEngineFactory`."""
    return _first("vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory")


def is_cpu() -> bool:
    """Return whether models run on a CPU."""
    return _first("vllm.platforms:current_platform").is_cpu()


def cpu_model_runner() -> Any:
    """Return `CPUModelRunner`, the class that runs a model on a CPU."""
    return _first("vllm.v1.worker.cpu_model_runner:CPUModelRunner")


def cpu_delta_net() -> Any | None:
    """Return the module of the gated delta net's CPU operator; None in a vLLM that does not have it."""
    return _owner_of("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:cpu_gdn_attention_core")


def fused_moe_method() -> Any | None:
    """Return `UnquantizedFusedMoEMethod`, which prepares experts; None where it does so in another way."""
    return _owner_of(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod._setup_kernel"
    )


def rotary_embedding() -> Any | None:
    """Return `RotaryEmbedding`, the base of all rotary embeddings; None where it has no code of its own for a CPU."""
    return _owner_of("vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu")


def image_tracker() -> Any:
    """Return `AsyncMultiModalItemTracker`, which resolves the pictures of a request."""
    return _first(
        "vllm.renderers.chat_utils:AsyncMultiModalItemTracker",  # 0.32
        "vllm.entrypoints.chat_utils:AsyncMultiModalItemTracker",  # 0.28 to 0.30
    )


def input_norm(model_config: Any) -> Callable[[Any, Any], Any]:
    """Return the normalization that the served vision tower applies to the pixels it is given.

    With `mm_device_do_normalize` the processor hands out raw bytes, and the model rescales and normalizes them.

    Args:
        model_config: vLLM's, of the running server.
    Returns:
        A function of ([rows, dim] pixels, a torch dtype) -> [rows, dim] of that dtype.
    """
    if not getattr(model_config.multimodal_config, "mm_device_do_normalize", False):
        return lambda pixels, dtype: pixels.to(dtype)
    build = _first(
        "vllm.model_executor.layers.fusion.mm_input_norm:build_mm_input_norm",  # 0.32
        "vllm.model_executor.models.vision:FusedInputNorm.from_model_config",  # 0.28 to 0.30
    )
    module = build(model_config)
    # The pixels are on the CPU here, also where the platform's own kernel wants them on a device.
    return getattr(module, "forward_native", module)


def current_config(vllm_config: Any) -> Any:
    """Return a context manager that makes `vllm_config` the current one; some of vLLM's modules are built only so."""
    return _first("vllm.config:set_current_vllm_config")(vllm_config)


def token_server_module() -> Any:
    """Return the module of the token server (`ServingTokens`)."""
    return _module("vllm.entrypoints.scale_out.token_in_token_out.serving")


def token_response() -> Any:
    """Return the model of a whole (not streamed) answer of the token server."""
    return _first(
        "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTokensResponse",  # 0.32
        "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateResponse",  # 0.28 to 0.30
    )


def _owner_of(place: str) -> Any | None:
    """Return what `module:[class.]name` is an attribute of, if all of it exists."""
    path, _, attributes = place.partition(":")
    try:
        owner = found = importlib.import_module(path)
        for attribute in attributes.split("."):
            owner, found = found, getattr(found, attribute)
    except (ModuleNotFoundError, AttributeError):
        return None
    return owner


def _first(*places: str) -> Any:
    """Return the first of several `module:attribute` that exists.

    Raises:
        UnknownVllm: none does.
    """
    for place in places:
        path, _, attributes = place.partition(":")
        try:
            found = importlib.import_module(path)
            for attribute in attributes.split("."):
                found = getattr(found, attribute)
        except (ModuleNotFoundError, AttributeError):
            continue
        return found
    import vllm

    raise UnknownVllm(
        f"vLLM {vllm.__version__} has none of {', '.join(places)}. latepix-vllm knows vLLM 0.28 to 0.32; install "
        "one of these, or add the new place to latepix_vllm/compat.py."
    )


def _module(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        import vllm

        raise UnknownVllm(
            f"vLLM {vllm.__version__} has no module {path} ({error}). latepix-vllm knows vLLM 0.28 to 0.32."
        ) from error
