"""The routes `GET /latepix/facts` and `POST /latepix/pixels`.

Goes in: the API server's app and its state. Comes out: what a client compares with its trainer, measured on the running
server with its own tokenizer, media connector and processor. Where answers of the token server lack fields that clients
need, they get them here, too.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse

from latepix_vllm import compat, pixels, token_server
from latepix_vllm.facts import image_processor_facts, tokenizer_facts


class LatepixEndpoint:
    """vLLM's endpoint plugin `latepix`."""

    name = "latepix"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and let the token server that is about to be made answer with what clients need."""
        token_server.install()
        app.add_api_route("/latepix/facts", _facts, methods=["GET"])
        app.add_api_route("/latepix/pixels", _pixels, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Prepare the state that the routes read."""
        state.latepix = _Server(engine_client, state.online_renderer.renderer)


class _Server:
    """What the running server works with.

    Attributes:
        engine_client: way to the engine.
        renderer: makes prompts of token ids and media, with the tokenizer and the processor in use.
        config: vLLM's whole configuration.
    """

    def __init__(self, engine_client: Any, renderer: Any) -> None:
        self.engine_client = engine_client
        self.renderer = renderer
        self.config = engine_client.vllm_config
        self._norm: Any = None

    def facts(self) -> dict[str, Any]:
        """Return everything but the weight version."""
        import PIL
        import tokenizers
        import torch
        import transformers
        import vllm

        config, model = self.config, self.config.model_config
        transfer = config.weight_transfer_config
        processing = self.renderer.get_mm_processor().info if model.is_multimodal_model else None
        return {
            "engine": "vllm",
            "versions": {
                "engine": vllm.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "tokenizers": tokenizers.__version__,
                "pillow": PIL.__version__,
            },
            "model": model.model,
            "model_type": model.hf_config.model_type,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "data_parallel_size": config.parallel_config.data_parallel_size,
            "logprobs_mode": model.logprobs_mode,
            "weight_transfer": None if transfer is None else transfer.backend,
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "tokenizer": tokenizer_facts(self.renderer.get_tokenizer()),
            "image_processor": None if processing is None else self._image_processor(processing),
            "mm_limits": {} if processing is None else dict(processing.allowed_mm_limits),
        }

    async def render(self, token_ids: list[int], urls: list[str]) -> dict[str, Any]:
        """Return the engine's input for a prompt, made as for `/inference/v1/generate`."""
        prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
        if urls:
            tracker = compat.image_tracker()(self.config.model_config)
            parser = tracker.create_parser()
            for url in urls:
                parser.parse_image(url, None)
            prompt["multi_modal_data"], uuids = await tracker.resolve_items()
            if uuids:
                prompt["multi_modal_uuids"] = uuids
        # The usual cache leaves out the pixels of pictures that the engine holds already.
        (rendered,) = await self.renderer.render_cmpl_async([prompt], skip_mm_cache=True)
        return rendered

    def norm(self) -> Any:
        """Return the normalization in front of the vision tower."""
        if self._norm is None:
            with compat.current_config(self.config):
                self._norm = compat.input_norm(self.config.model_config)
        return self._norm

    def _image_processor(self, processing: Any) -> dict[str, Any]:
        multimodal = self.config.model_config.multimodal_config
        processor = processing.get_hf_processor().image_processor
        if scoped := (multimodal.mm_processor_kwargs or {}).get("images_kwargs"):
            # vLLM hands these over with every call, and not to the processor that it makes.
            processor = type(processor).from_dict(processor.to_dict(), **scoped)
        facts = image_processor_facts(processor)
        if getattr(multimodal, "mm_device_do_normalize", False):
            # vLLM switched both off in the processor because the model does them: they are done all the same.
            facts |= {"do_rescale": True, "do_normalize": True}
        return facts


async def _facts(request: Request) -> JSONResponse:
    server: _Server = request.app.state.latepix
    # Hashing a vocabulary of 150,000 tokens takes a while, and other requests are being answered meanwhile.
    facts = await asyncio.to_thread(server.facts)
    return JSONResponse({**facts, "weight_version": await server.engine_client.get_weight_version()})


async def _pixels(request: Request) -> JSONResponse:
    server: _Server = request.app.state.latepix
    try:
        body = await request.json()
    except ValueError as error:
        raise ValueError(f"The body is not JSON: {error}.") from error
    token_ids, urls = pixels.parse_request(body)
    pixels.check_placeholders(token_ids, len(urls), server.config.model_config.hf_config)
    rendered = await server.render(token_ids, urls)
    placeholders = token_server.placeholder_ranges(rendered) or {}
    norm = server.norm()
    items = [item for modality in placeholders for item in rendered["mm_kwargs"][modality]]
    images = await asyncio.to_thread(lambda: [pixels.describe_item(item.get_data(), norm) for item in items])
    return JSONResponse(
        {"prompt_token_ids": list(rendered["prompt_token_ids"]), "mm_placeholders": placeholders, "images": images}
    )
