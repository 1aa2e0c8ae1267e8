"""`latepix serve`: the local engine behind its routes, until it is stopped."""

from __future__ import annotations

import torch
import uvicorn

from latepix.config.schema import RunConfig
from latepix.families.base import torch_dtype
from latepix.families.model_info import read_model_info
from latepix.inference.contract import MAX_BODY_BYTES
from latepix.inference.local_engine import LocalEngine
from latepix.inference.local_server import EngineThread, build_app
from latepix.processes import bind
from latepix.trace.ingress import ImageLimits


def run_server(config: RunConfig) -> None:
    """Load the model and serve it on `inference.host`:`inference.port`.

    Raises:
        ConfigError: the port is taken, or the model cannot be loaded.
    """
    inference = config.inference
    with bind(inference.host, inference.port) as sock:
        torch.set_num_threads(inference.num_threads)
        # What passed the orchestrator's door has to pass here: fitted and encoded anew, a picture may have grown.
        max_pixels = max(config.images.max_pixels, read_model_info(config.model.path).grid.max_pixels)
        engine = LocalEngine(
            config.model.path,
            dtype=torch_dtype(config.model.dtype),
            device="cuda" if torch.cuda.is_available() else "cpu",
            max_model_len=inference.max_model_len,
            limits=ImageLimits(max_bytes=MAX_BODY_BYTES, max_pixels=max_pixels),
        )
        thread = EngineThread(
            engine, max_batch_size=inference.max_batch_size, batch_window_s=inference.batch_window_ms / 1000
        )
        print(f"serving {config.model.path} on http://{inference.host}:{sock.getsockname()[1]}", flush=True)
        server = uvicorn.Server(
            uvicorn.Config(build_app(thread), log_level="warning", access_log=False, timeout_graceful_shutdown=2)
        )
        try:
            server.run(sockets=[sock])
        finally:
            thread.stop()
