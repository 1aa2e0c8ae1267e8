"""The client of the inference contract: token ids and pictures in, a checked `Generation` out.

Requests for the same prompt that are made together travel as one HTTP request with `n` answers, so a group of rollouts
sends its pictures once. Answer i of such a request is seeded with `seed + i`, in vLLM and in the local engine alike;
that is why only requests with consecutive seeds are joined.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from latepix.errors import InferenceError, ProcessFailed, StaleWeights, TransportError
from latepix.inference.contract import (
    Choice,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    policy_version_of,
    version_label,
)
from latepix.trace.ingress import InlineImage
from latepix.trace.messages import image_content_part
from latepix.trace.refs import PlaceholderRange

#: A logit bias this low bans a token: vLLM clamps biases to 100, and exp(-100) is never drawn.
BAN_BIAS = -100.0
#: Idle connections are closed by us: uvicorn (and so vLLM) drops them after 5 s, and a request sent just then is lost.
_KEEPALIVE_S = 3.0


class Prompt(msgspec.Struct, frozen=True):
    """A logical prompt: one placeholder per picture."""

    token_ids: tuple[int, ...]
    images: tuple[InlineImage, ...] = ()


class Sampling(msgspec.Struct, frozen=True):
    """How one answer is drawn; temperature 0 is greedy."""

    temperature: float
    max_tokens: int
    seed: int = 0


class Generation(msgspec.Struct, frozen=True):
    """One answer of the server, checked.

    Attributes:
        prompt_token_ids: expanded prompt.
        ranges: placeholder ranges in prompt order, absolute.
        token_ids: sampled ids, the stop id included.
        logprobs: [len(token_ids)] nats.
        finish_reason: `stop` or `length`.
        policy_version: oldest weights that sampled one of the tokens; None if neither server nor client knows.
    """

    prompt_token_ids: list[int]
    ranges: list[PlaceholderRange]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    policy_version: int | None


class _Waiting(msgspec.Struct, eq=False):
    seed: int
    answer: asyncio.Future[Generation]


class InferenceClient:
    """Talks to one server. Use it from one event loop, and close it there."""

    def __init__(
        self, base_url: str, *, stop_ids: Sequence[int], banned_ids: Sequence[int], timeout_s: float = 300.0
    ) -> None:
        self.base_url = base_url
        self._stop_ids = list(stop_ids)
        self._bans = {str(token): BAN_BIAS for token in banned_ids}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._waiting: dict[tuple[Any, ...], list[_Waiting]] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._policy_version: int | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        """Sample one answer.

        Raises:
            InferenceError: the server refused or failed, or its answer does not fit the request.
        """
        loop = asyncio.get_running_loop()
        key = (
            prompt.token_ids,
            tuple(image.sha256 for image in prompt.images),
            sampling.temperature,
            sampling.max_tokens,
        )
        waiting = _Waiting(seed=sampling.seed, answer=loop.create_future())
        if key in self._waiting:
            self._waiting[key].append(waiting)
        else:
            self._waiting[key] = [waiting]
            # Everything that is ready to run now still gets to add its request before this is called.
            loop.call_soon(self._send_waiting, key, prompt, sampling)
        return await waiting.answer

    def _send_waiting(self, key: tuple[Any, ...], prompt: Prompt, sampling: Sampling) -> None:
        waiting = sorted(self._waiting.pop(key), key=lambda one: one.seed)
        # One run per stretch of consecutive seeds.
        for _, run in itertools.groupby(enumerate(waiting), key=lambda pair: pair[1].seed - pair[0]):
            task = asyncio.get_running_loop().create_task(self._send([one for _, one in run], prompt, sampling))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, waiting: list[_Waiting], prompt: Prompt, sampling: Sampling) -> None:
        try:
            answers = await self._request(prompt, sampling, seed=waiting[0].seed, n=len(waiting))
        except BaseException as error:
            for one in waiting:
                if not one.answer.done():
                    one.answer.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            for one, answer in zip(waiting, answers, strict=True):
                if not one.answer.done():
                    one.answer.set_result(answer)

    async def _request(self, prompt: Prompt, sampling: Sampling, *, seed: int, n: int) -> list[Generation]:
        request = GenerateRequest(
            token_ids=list(prompt.token_ids),
            content_parts=[image_content_part(image) for image in prompt.images],
            sampling_params=SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_tokens,
                n=n,
                seed=seed,
                stop_token_ids=self._stop_ids,
                logit_bias=self._bans,
                logprobs=0,
                detokenize=False,
            ),
            return_token_ids=True,
            cache_salt=None if self._policy_version is None else version_label(self._policy_version),
        )
        where = f"{self.base_url}/inference/v1/generate"
        try:
            status, content = await self._call("POST", "/inference/v1/generate", msgspec.json.encode(request))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise InferenceError(
                f"{where} did not answer ({type(error).__name__}: {error}). Is the inference server running?"
            ) from error
        if status != 200:
            raise InferenceError(f"{where} answered HTTP {status}: {_server_message(content)}")
        try:
            response = msgspec.json.decode(content, type=GenerateResponse)
        except msgspec.MsgspecError as error:
            raise InferenceError(f"{where} answered something that is not a generate response: {error}.") from error
        return _check_response(response, prompt, n, where, self._policy_version)

    async def update_weights(self, path: Path, policy_version: int) -> None:
        """Let the server load a weights folder and report `policy_version` from then on.

        Raises:
            TransportError: the server refused; its old weights go on serving.
            StaleWeights: the server says done, but reports another version.
        """
        await self._post("/pause?mode=keep", None)
        try:
            await self._post("/start_weight_update", None)
            await self._post("/update_weights", {"update_info": {"path": str(path)}})
            await self._post("/finish_weight_update", {"weight_version": version_label(policy_version)})
        finally:
            await self._post("/resume", None)
        served = await self.policy_version()
        if served != policy_version:
            raise StaleWeights(
                f"{self.base_url} was given weights {version_label(policy_version)} from {path} and said done, but "
                f"reports version {served}."
            )
        self._policy_version = policy_version

    async def init_weight_transfer(self) -> None:
        """Prepare the server for weight updates; once, before the first."""
        await self._post("/init_weight_transfer_engine", {"init_info": {}})

    async def policy_version(self) -> int | None:
        """Return the version of the weights that are served, None if it is not one of ours."""
        return policy_version_of(str(msgspec.json.decode(await self._get("/weight_info"))["weight_version"]))

    async def peak_rss_bytes(self) -> int | None:
        """Return the local server's largest resident memory; None if the server does not say."""
        content = await self._get("/health")
        return msgspec.json.decode(content).get("peak_rss_bytes") if content else None

    async def _get(self, route: str) -> bytes:
        return await self._control("GET", route, None)

    async def _post(self, route: str, body: dict[str, Any] | None) -> None:
        await self._control("POST", route, None if body is None else msgspec.json.encode(body))

    async def _control(self, method: str, route: str, body: bytes | None) -> bytes:
        try:
            status, content = await self._call(method, route, body)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TransportError(f"{self.base_url}{route} did not answer ({type(error).__name__}: {error}).") from error
        if status != 200:
            raise TransportError(f"{self.base_url}{route} answered HTTP {status}: {_server_message(content)}")
        return content

    async def _call(self, method: str, route: str, body: bytes | None) -> tuple[int, bytes]:
        """Send one request; returns the status and the body of the answer."""
        if self._session is None:
            # Made here, not in __init__: it belongs to the event loop that runs now.
            connector = aiohttp.TCPConnector(limit=128, keepalive_timeout=_KEEPALIVE_S)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=self._timeout_s)
            )
        headers = {"content-type": "application/json"} if body is not None else None
        async with self._session.request(method, self.base_url + route, data=body, headers=headers) as answer:
            return answer.status, await answer.read()


def wait_until_healthy(base_url: str, *, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
    """Block until the server answers /health.

    Args:
        base_url: of the server.
        timeout_s: seconds until it is given up.
        check: called again and again while waiting; raises if there is no hope.
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
        except OSError as error:
            last = str(error)
        time.sleep(0.05)
    raise ProcessFailed(
        f"The inference server at {base_url} did not become healthy within {timeout_s:g} s "
        f"(inference.startup_timeout_s; last: {last}). See its log."
    )


def _server_message(content: bytes) -> str:
    try:
        body = msgspec.json.decode(content)
        message = body["error"]["message"] if isinstance(body["error"], dict) else body["error"]
        return str(message)[:500]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return content.decode("utf-8", errors="replace")[:500]


def _check_response(
    response: GenerateResponse, prompt: Prompt, n: int, where: str, last_version: int | None
) -> list[Generation]:
    if response.prompt_token_ids is None:
        raise InferenceError(f"{where}: no prompt_token_ids in the answer. The server must be vLLM 0.30 or newer.")
    placed = sorted((r for ranges in (response.mm_placeholders or {}).values() for r in ranges), key=lambda r: r.offset)
    ranges = [PlaceholderRange(offset=r.offset, length=r.length) for r in placed]
    if len(ranges) != len(prompt.images):
        raise InferenceError(f"{where}: {len(prompt.images)} pictures were sent, {len(ranges)} ranges came back.")
    choices = sorted(response.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(n)):
        raise InferenceError(f"{where}: asked for {n} answers, got indices {[c.index for c in choices]}.")
    return [
        Generation(
            prompt_token_ids=response.prompt_token_ids,
            ranges=ranges,
            token_ids=choice.token_ids,
            logprobs=_check_logprobs(choice, where),
            finish_reason=_check_finish(choice, where),
            policy_version=_oldest_version(choice, last_version),
        )
        for choice in choices
    ]


def _check_finish(choice: Choice, where: str) -> str:
    reason = choice.finish_reason or "stop"
    if reason not in ("stop", "length"):
        # An answer that the server gave up half-way (`abort`) would be trained as if the policy had ended it.
        raise InferenceError(
            f"{where}, answer {choice.index}: finish_reason is {reason!r}, wanted stop or length. See the server's log."
        )
    return reason


def _check_logprobs(choice: Choice, where: str) -> list[float]:
    content = (choice.logprobs.content if choice.logprobs else None) or []
    if [entry.id for entry in content] != choice.token_ids:
        raise InferenceError(
            f"{where}, answer {choice.index}: {len(choice.token_ids)} tokens, but {len(content)} logprobs, or logprobs "
            "of other tokens. The server must return the logprob of every sampled token."
        )
    logprobs = [entry.logprob for entry in content]
    if not all(math.isfinite(value) and value <= 1e-3 for value in logprobs):
        raise InferenceError(f"{where}, answer {choice.index}: a logprob is positive or not finite.")
    return logprobs


def _oldest_version(choice: Choice, last_version: int | None) -> int | None:
    """Return the oldest version that sampled a token; a server that does not say served what it was last given."""
    versions = [policy_version_of(span.version) for span in choice.weight_versions or ()]
    return min((version for version in versions if version is not None), default=last_version)
