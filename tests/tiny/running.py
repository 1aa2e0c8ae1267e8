"""Real servers for tests: the local engine and vLLM, started as a run starts them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from latepix.config.schema import RunConfig
from latepix.families.model_info import ModelInfo, read_model_info
from latepix.inference.client import InferenceClient
from latepix.inference.control import ServerControl
from latepix.launcher import at_server, inference_server
from latepix.orchestrator.server import client_of

T = TypeVar("T")
#: Python of the environment that `make vllm-env` builds.
VLLM_PYTHON = Path(os.environ.get("LATEPIX_VLLM_PYTHON", Path(__file__).parents[2] / ".venv-vllm/bin/python"))


class RunningServer(msgspec.Struct, frozen=True):
    """A server that runs.

    Attributes:
        engine: `local` or `vllm`.
        base_url: its address.
        model: folder it was started with.
        config: of a run that is attached to it.
    """

    engine: Literal["local", "vllm"]
    base_url: str
    model: Path
    config: RunConfig

    @property
    def info(self) -> ModelInfo:
        """Facts of the model."""
        return read_model_info(self.model)

    def use(self, use: Callable[[InferenceClient, ServerControl], Awaitable[T]]) -> T:
        """Run something with a client of the server."""

        async def main() -> T:
            client = client_of(self.config, self.info)
            try:
                return await use(client, ServerControl(client.connection))
            finally:
                await client.close()

        return asyncio.run(main())

    def reset(self) -> None:
        """Let it serve the weights it was started with, as version 0."""

        async def back(client: InferenceClient, control: ServerControl) -> None:
            if await control.weight_version() not in ("default", "step-0"):
                await control.init_weight_transfer()
                await control.update_weights(self.model, 0)

        self.use(back)


def server_config(engine: Literal["local", "vllm"], model: Path, out: Path) -> RunConfig:
    """Return the config of a small server."""
    inference: dict[str, object] = {"engine": engine, "max_model_len": 512, "max_batch_size": 64}
    if engine == "vllm":
        inference["vllm"] = {"python": VLLM_PYTHON}
    return RunConfig.model_validate({"output_dir": out, "model": {"path": model}, "inference": inference})


@contextlib.contextmanager
def run_server(engine: Literal["local", "vllm"], model: Path, out: Path) -> Generator[RunningServer]:
    """Run a server until the end of the block."""
    config = server_config(engine, model, out)
    with inference_server(config) as base_url:
        yield RunningServer(engine=engine, base_url=base_url, model=model, config=at_server(config, base_url))
