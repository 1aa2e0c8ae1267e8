"""The server's routes beside sampling: new weights, facts, and what its pipeline makes of a picture.

A weight update pauses the server, hands over the weights, names the version and lets the server go on. What holds:

* requests in flight survive: they wait, and go on with the new weights; their answers say which token is whose;
* prefix, multimodal and encoder caches are empty afterwards (`/pause` empties them);
* the server is resumed whatever happens, and a failed update is an error with the server's own reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec

from latepix.config.schema import WeightUpdate
from latepix.errors import SchemaMismatch, StaleWeights, TransportError
from latepix.inference.client import Prompt
from latepix.inference.contract import PixelsResponse, image_part, policy_version_of, version_label
from latepix.inference.facts import Facts, facts_of_server_info
from latepix.inference.http import ServerConnection


class ServerControl:
    """Everything but sampling, over the connection of a client."""

    def __init__(self, connection: ServerConnection, *, weight_update: WeightUpdate = "safetensors_dir") -> None:
        self._connection = connection
        self._weight_update = weight_update

    async def init_weight_transfer(self) -> None:
        """Prepare the server for weight updates; once, before the first.

        Raises:
            TransportError: it refused.
        """
        if self._weight_update == "safetensors_dir":
            await self._post("/init_weight_transfer_engine", {"init_info": {}})

    async def update_weights(self, path: Path, policy_version: int) -> None:
        """Let the server load a weights folder and report `policy_version` from then on.

        Raises:
            TransportError: the server refused; its old weights go on serving.
            StaleWeights: the server says done, but reports another version.
        """
        label = version_label(policy_version)
        if self._weight_update == "nccl":
            # The trainer has handed them over already: it has to be in the broadcast itself.
            await self._check_version(path, policy_version)
            return
        try:
            await self._post("/pause?mode=keep")
            if self._weight_update == "reload_weights":
                await self._reload(path, label)
            else:
                await self._post("/start_weight_update")
                await self._post("/update_weights", {"update_info": {"path": str(path)}})
                await self._post("/finish_weight_update", {"weight_version": label})
        except BaseException as error:
            # A server that refuses to go on as well must not hide why the update failed.
            with contextlib.suppress(TransportError):
                await asyncio.shield(self._post("/resume"))
            if isinstance(error, TransportError):
                # vLLM leaves paths out of its messages.
                raise TransportError(
                    f"The server did not take weights {label} from {path}: {error} {self._state_after(error)}",
                    status=error.status,
                ) from error
            raise
        await self._post("/resume")
        await self._check_version(path, policy_version)

    def _state_after(self, error: TransportError) -> str:
        if self._weight_update == "safetensors_dir" and error.status is not None:
            return "It goes on with the weights it had."
        if error.status is None:
            return "What it serves now is not known: start it anew (or raise inference.request_timeout_s)."
        return "What it serves now is not known: start it anew."

    async def _check_version(self, path: Path, policy_version: int) -> None:
        served = await self.weight_version()
        if policy_version_of(served) != policy_version:
            raise StaleWeights(
                f"{self._connection.base_url} was given weights {version_label(policy_version)} from {path} and said "
                f"done, but reports version {served}."
            )

    async def _reload(self, path: Path, label: str) -> None:
        """Use vLLM's `reload_weights` on every worker; the caches were emptied by the pause before it."""
        kwargs = {"weights_path": str(path)}
        await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        await self.set_weight_version(label)

    async def weight_version(self) -> str:
        """Return the label of the weights that are served.

        Raises:
            TransportError: the server does not say.
        """
        content = await self._connection.control("GET", "/weight_info")
        return str(self._decode(content, dict[str, Any], "/weight_info").get("weight_version"))

    async def set_weight_version(self, label: str) -> None:
        """Name the weights that are served, without changing them."""
        await self._post("/update_weight_version", {"new_version": label})

    async def facts(self) -> Facts:
        """Return how the server is set up.

        A vLLM without our plugin has no `/latepix/facts`; what its own routes say is less.

        Raises:
            TransportError: the server does not answer, or not as expected.
        """
        try:
            content = await self._connection.control("GET", "/latepix/facts")
            return self._decode(content, Facts, "/latepix/facts")
        except TransportError as error:
            if error.status != 404:
                raise
        info = await self._connection.control("GET", "/server_info?config_format=json")
        version = await self._connection.control("GET", "/version")
        return facts_of_server_info(
            self._decode(info, dict[str, Any], "/server_info"),
            version=str(self._decode(version, dict[str, Any], "/version").get("version")),
            weight_version=await self.weight_version(),
        )

    async def pixels(self, prompt: Prompt) -> PixelsResponse:
        """Return what the server's own pipeline makes of a prompt with pictures.

        Raises:
            TransportError: it refused a picture (`status` 400), or has no such route (404).
        """
        body = {
            "token_ids": list(prompt.token_ids),
            "content_parts": [image_part(image.url) for image in prompt.images],
        }
        content = await self._connection.control("POST", "/latepix/pixels", body)
        return self._decode(content, PixelsResponse, "/latepix/pixels")

    async def peak_rss_bytes(self) -> int | None:
        """Return the local server's largest resident memory; None if the server does not say."""
        content = await self._connection.control("GET", "/health")
        return msgspec.json.decode(content).get("peak_rss_bytes") if content else None

    async def _post(self, route: str, body: dict[str, Any] | None = None) -> None:
        await self._connection.control("POST", route, body)

    def _decode(self, content: bytes, kind: Any, route: str) -> Any:
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            raise SchemaMismatch(
                f"{self._connection.base_url}{route} answered something else than expected: {error}. Install the same "
                "version of latepix and latepix-vllm on both sides."
            ) from error
