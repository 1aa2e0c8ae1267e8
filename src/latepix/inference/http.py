"""One HTTP connection pool to an inference server, and what its error answers say."""

from __future__ import annotations

import http.client
import io
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec

from latepix.errors import ProcessFailed, TransportError

#: Idle connections are closed by us: uvicorn (and so vLLM) drops them after 5 s, and a request sent just then is lost.
_KEEPALIVE_S = 3.0
_LARGE_BODY_BYTES = 1 << 20
_POLL_S = 0.05


class ServerConnection:
    """Talks HTTP to one server. Use it from one event loop, and close it there."""

    def __init__(self, base_url: str, *, timeout_s: float = 300.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def request(
        self, method: str, route: str, body: bytes | None = None, *, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Send one request; returns the status and the body of the answer.

        Raises:
            aiohttp.ClientError, TimeoutError: there was no answer.
        """
        if self._session is None:
            # Made here, not in __init__: it belongs to the event loop that runs now.
            connector = aiohttp.TCPConnector(limit=128, keepalive_timeout=_KEEPALIVE_S)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=self._timeout_s)
            )
        # aiohttp copies a large body to the socket in pieces only if it can read it like a file.
        data = io.BytesIO(body) if body is not None and len(body) > _LARGE_BODY_BYTES else body
        sent = dict(headers or {})
        if body is not None:
            sent["content-type"] = "application/json"
        async with self._session.request(method, self.base_url + route, data=data, headers=sent) as answer:
            return answer.status, await answer.read()

    async def control(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Send one request that must succeed, and return the body of the answer.

        Raises:
            TransportError: the server is not there or refused; `status` says with which HTTP status.
        """
        encoded = None if body is None else msgspec.json.encode(body)
        try:
            status, content = await self.request(method, route, encoded)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TransportError(f"{self.base_url}{route} did not answer ({type(error).__name__}: {error}).") from error
        if status != 200:
            raise TransportError(
                f"{self.base_url}{route} answered HTTP {status}: {server_message(content)}{remedy_of(status, route)}",
                status=status,
            )
        return content


def server_message(content: bytes) -> str:
    """Return what an error answer says, at most 500 characters; servers word it in several forms."""
    try:
        body = msgspec.json.decode(content)
        error = body.get("error", body.get("detail", body))
        return str(error["message"] if isinstance(error, dict) and "message" in error else error)[:500]
    except (msgspec.MsgspecError, AttributeError):
        return content.decode("utf-8", errors="replace")[:500]


def remedy_of(status: int, route: str) -> str:
    """Return what to do about an HTTP status of a route, with a space in front; empty if nobody can know."""
    if status == 403 and route.startswith("/inference/"):
        return " Start vLLM with --enable-scale-out: without it the token-in, token-out route refuses everything."
    if status in (404, 405) and route.startswith("/inference/"):
        return " The server must be vLLM 0.30 or newer (0.28 and 0.29 with latepix-vllm), or `latepix serve`."
    if status in (404, 405):
        return (
            " vLLM has its weight-update routes only with VLLM_SERVER_DEV_MODE=1 in its environment; `latepix serve` "
            "sets it."
        )
    return ""


def wait_until_healthy(base_url: str, *, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
    """Block until the server answers /health.

    Args:
        base_url: of the server.
        timeout_s: seconds until it is given up.
        check: called again and again while waiting; raises if there is no hope, or shows how far it is.
    Raises:
        ProcessFailed: it did not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    last = "no answer"
    # Like aiohttp, and unlike urlopen: HTTP_PROXY in the environment is not meant for our own server.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        check()
        try:
            with opener.open(f"{base_url}/health", timeout=5.0):
                return
        except urllib.error.HTTPError as error:
            last = f"HTTP {error.code}"
        except (OSError, http.client.HTTPException) as error:
            last = str(error) or type(error).__name__
        time.sleep(_POLL_S)
    raise ProcessFailed(
        f"The inference server at {base_url} did not become healthy within {timeout_s:g} s "
        f"(inference.startup_timeout_s; last: {last}). See its log."
    )
