"""Weights to vLLM by NCCL broadcast, from GPU to GPU, without a disk between. **Not run**: no GPU was at hand.

vLLM's own trainer-side engine does the work, so vLLM (0.32 or newer) has to be installed in the trainer's
environment, too. Here the trainer drives the update, not the orchestrator: both sides must be in the broadcast at the
same time. The folder of the version is then published empty, as the sign that the server has it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from latepix.errors import ConfigError, TransportError
from latepix.families.base import Adapter
from latepix.inference.contract import version_label

_TIMEOUT_S = 300.0


class NcclSender:
    """Sends the weights of a model to the server's workers.

    Raises:
        ConfigError: there is no GPU, or no vLLM in this environment.
    """

    def __init__(self, model: PreTrainedModel, adapter: Adapter, base_url: str) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("inference.weight_update = 'nccl' needs GPUs on both sides; use 'safetensors_dir'.")
        try:
            from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource  # ty: ignore[import-not-found]
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # ty: ignore[import-not-found]
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo  # ty: ignore[import-not-found]
        except ImportError as error:
            raise ConfigError(
                "inference.weight_update = 'nccl' needs vLLM 0.32 or newer in the trainer's environment as well "
                f"({error}); or use 'safetensors_dir'."
            ) from error

        class HubWeights(WeightSource):
            """The weights under their hub names, as the server's loader expects them."""

            def metadata(self) -> list[Any]:
                return [
                    ParamMeta(name, tensor.dtype, tuple(tensor.shape))
                    for name, tensor in adapter.hub_state_dict(model).items()
                ]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                yield from ((name, tensor.contiguous()) for name, tensor in adapter.hub_state_dict(model).items())

        self._routes = _Routes(base_url)
        host, port = _free_address(base_url)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(
                master_address=host, master_port=port, world_size=1 + self._routes.world_size(), rank=0
            ),
            client=self._routes,
            source=HubWeights(),
        )

    def send(self, policy_version: int) -> None:
        """Pause the server, broadcast, name the version, let the server go on.

        Raises:
            TransportError: the server refused.
        """
        self._routes.label = version_label(policy_version)
        try:
            self._routes.post("/pause?mode=keep")
            self._engine.send_weights()
        except BaseException:
            # A server that refuses to go on as well must not hide why the update failed.
            with contextlib.suppress(TransportError):
                self._routes.post("/resume")
            raise
        self._routes.post("/resume")


class _Routes:
    """The four calls that vLLM's sender makes, over HTTP; `label` names the version that is finished next."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self.label = version_label(0)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.post("/finish_weight_update", {"weight_version": weight_version or self.label})

    def world_size(self) -> int:
        """Return the number of the server's workers."""
        return int(json.loads(self._send(urllib.request.Request(f"{self._base_url}/get_world_size")))["world_size"])

    def post(self, route: str, body: Any = None) -> None:
        """Send one request that must succeed."""
        self._send(
            urllib.request.Request(
                self._base_url + route,
                data=json.dumps(body).encode() if body is not None else b"",
                headers={"content-type": "application/json"},
                method="POST",
            )
        )

    def _send(self, request: urllib.request.Request) -> bytes:
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_TIMEOUT_S) as got:
                return got.read()
        except (OSError, http.client.HTTPException) as error:
            raise TransportError(f"{request.full_url} failed: {error}.") from error


def _free_address(base_url: str) -> tuple[str, int]:
    """Return the address of this machine that the server's machine sees, and a free port on it."""
    server = urllib.parse.urlsplit(base_url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing: it only asks which of our addresses would be used.
        probe.connect((server.hostname or "127.0.0.1", server.port or 80))
        host = probe.getsockname()[0]
    with socket.socket() as listener:
        listener.bind((host, 0))
        return host, listener.getsockname()[1]
