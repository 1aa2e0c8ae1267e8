"""The client of the inference contract: token ids and pictures in, a checked `Generation` out.

Requests for the same prompt that are made together travel as one HTTP request with `n` answers, so a group of rollouts
sends its pictures once. Answer i of such a request is seeded with `seed + i`, in vLLM and in the local engine alike;
that is why only requests with consecutive seeds are joined.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from latepix.errors import InferenceError, PlaceholderMismatch
from latepix.inference.contract import (
    Choice,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    image_part,
    policy_version_of,
    version_label,
)
from latepix.inference.http import ServerConnection, remedy_of, server_message
from latepix.trace.graph import PolicySpan
from latepix.trace.ingress import InlineImage
from latepix.trace.refs import PlaceholderRange

#: A logit bias this low bans a token: vLLM clamps biases to 100, and exp(-100) is never drawn.
BAN_BIAS = -100.0
#: A server error is tried again after so many seconds. vLLM (0.32) answers one for a picture that came before in a
#: request it refused: its two picture caches then differ, which the failed request mends.
_RETRY_DELAYS_S = (0.05, 0.5)
_TOO_MANY_REQUESTS = 429
GENERATE_ROUTE = "/inference/v1/generate"
#: Keeps a request on one data-parallel rank of vLLM.
DATA_PARALLEL_HEADER = "X-data-parallel-rank"


class Prompt(msgspec.Struct, frozen=True):
    """A logical prompt: one placeholder per picture."""

    token_ids: tuple[int, ...]
    images: tuple[InlineImage, ...] = ()


class Sampling(msgspec.Struct, frozen=True):
    """How one answer is drawn; temperature 0 is greedy."""

    temperature: float
    max_tokens: int
    seed: int = 0


class Routing(msgspec.Struct, frozen=True):
    """Where and when a request is served, which changes nothing of what is sampled.

    Attributes:
        data_parallel_rank: of the server, to keep what shares a prefix on one rank; None leaves it to the server.
        priority: lower is earlier.
        kv_transfer_params: of disaggregated serving.
    """

    data_parallel_rank: int | None = None
    priority: int = 0
    kv_transfer_params: dict[str, Any] | None = None


#: Where nothing is asked for.
ANYWHERE = Routing()


class Generation(msgspec.Struct, frozen=True):
    """One answer of the server, checked.

    Attributes:
        prompt_token_ids: expanded prompt.
        ranges: placeholder ranges in prompt order, absolute.
        token_ids: sampled ids, the stop id included.
        logprobs: [len(token_ids)] nats.
        finish_reason: `stop` or `length`.
        policy_version: oldest weights that sampled one of the tokens; None if neither server nor client knows.
        policy_spans: which weights sampled which tokens, where the server says it by our labels.
        kv_transfer_params: of disaggregated serving, as the server answered.
    """

    prompt_token_ids: list[int]
    ranges: list[PlaceholderRange]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    policy_version: int | None
    policy_spans: tuple[PolicySpan, ...] = ()
    kv_transfer_params: dict[str, Any] | None = None


class _Waiting(msgspec.Struct, eq=False):
    seed: int
    answer: asyncio.Future[Generation]


class InferenceClient:
    """Samples from one server. Use it from one event loop, and close it there.

    Args:
        base_url: of the server.
        stop_ids: end an answer.
        banned_ids: are never sampled.
        placeholder_ids: stand for pictures in a prompt; vLLM serves one that has no picture as a word like others, so
            that the policy would answer without seeing anything: refused here.
        timeout_s: for one request.

    Attributes:
        connection: to the server; its other routes are reached over it, too.
        policy_version: of the weights the server was last given; None if it is not known. Salts the server's prefix
            cache, and stands for the version where an answer names none.
        num_retries: requests that were sent again after a server error, so far.
    """

    def __init__(
        self,
        base_url: str,
        *,
        stop_ids: Sequence[int],
        banned_ids: Sequence[int],
        placeholder_ids: Sequence[int] = (),
        timeout_s: float = 300.0,
    ) -> None:
        self._placeholder_ids = frozenset(placeholder_ids)
        self.connection = ServerConnection(base_url, timeout_s=timeout_s)
        self.policy_version: int | None = None
        self.num_retries = 0
        self._stop_ids = list(stop_ids)
        self._bans = {str(token): BAN_BIAS for token in banned_ids}
        self._waiting: dict[tuple[Any, ...], list[_Waiting]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def base_url(self) -> str:
        """Address of the server."""
        return self.connection.base_url

    async def close(self) -> None:
        """Close the connections."""
        await self.connection.close()

    async def generate(self, prompt: Prompt, sampling: Sampling, routing: Routing = ANYWHERE) -> Generation:
        """Sample one answer.

        Raises:
            InferenceError: the server refused or failed, or its answer does not fit the request.
            PlaceholderMismatch: it left a picture token without a picture.
        """
        loop = asyncio.get_running_loop()
        key = (
            prompt.token_ids,
            tuple(image.sha256 for image in prompt.images),
            sampling.temperature,
            sampling.max_tokens,
            routing.data_parallel_rank,
            routing.priority,
            msgspec.json.encode(routing.kv_transfer_params, order="sorted"),
        )
        waiting = _Waiting(seed=sampling.seed, answer=loop.create_future())
        if key in self._waiting:
            self._waiting[key].append(waiting)
        else:
            self._waiting[key] = [waiting]
            # Everything that is ready to run now still gets to add its request before this is called.
            loop.call_soon(self._send_waiting, key, prompt, sampling, routing)
        return await waiting.answer

    def _send_waiting(self, key: tuple[Any, ...], prompt: Prompt, sampling: Sampling, routing: Routing) -> None:
        waiting = sorted(self._waiting.pop(key), key=lambda one: one.seed)
        # One run per stretch of consecutive seeds.
        for _, run in itertools.groupby(enumerate(waiting), key=lambda pair: pair[1].seed - pair[0]):
            task = asyncio.get_running_loop().create_task(
                self._send([one for _, one in run], prompt, sampling, routing)
            )
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, waiting: list[_Waiting], prompt: Prompt, sampling: Sampling, routing: Routing) -> None:
        try:
            answers = await self._request(prompt, sampling, routing, seed=waiting[0].seed, n=len(waiting))
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

    async def _request(
        self, prompt: Prompt, sampling: Sampling, routing: Routing, *, seed: int, n: int
    ) -> list[Generation]:
        # Known now: an update may come while the answer is awaited.
        version = self.policy_version
        request = GenerateRequest(
            token_ids=list(prompt.token_ids),
            content_parts=[image_part(image.url) for image in prompt.images],
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
            cache_salt=None if version is None else version_label(version),
            priority=routing.priority,
            kv_transfer_params=routing.kv_transfer_params,
        )
        rank = routing.data_parallel_rank
        headers = None if rank is None else {DATA_PARALLEL_HEADER: str(rank)}
        where = self.base_url + GENERATE_ROUTE
        status, content = await self._send_with_retries(msgspec.json.encode(request), headers, where)
        if status != 200:
            raise InferenceError(
                f"{where} answered HTTP {status}: {server_message(content)}{remedy_of(status, GENERATE_ROUTE)}"
            )
        try:
            response = msgspec.json.decode(content, type=GenerateResponse)
        except msgspec.MsgspecError as error:
            raise InferenceError(f"{where} answered something that is not a generate response: {error}.") from error
        _check_pictures(response, prompt, self._placeholder_ids, where)
        return _check_response(response, n, where, version)

    async def _send_with_retries(self, body: bytes, headers: dict[str, str] | None, where: str) -> tuple[int, bytes]:
        """Send a request, and again if the server failed at it; a request with a seed has the same answer each time."""
        delays = iter(_RETRY_DELAYS_S)
        while True:
            delay_s = next(delays, None)
            try:
                status, content = await self.connection.request("POST", GENERATE_ROUTE, body, headers=headers)
                if (status < 500 and status != _TOO_MANY_REQUESTS) or delay_s is None:
                    return status, content
            except (aiohttp.ClientError, TimeoutError) as error:
                # One that waited for its whole time-out is not sent again.
                if delay_s is None or isinstance(error, TimeoutError):
                    raise InferenceError(
                        f"{where} did not answer ({type(error).__name__}: {error}). Is the inference server running?"
                    ) from error
            self.num_retries += 1
            await asyncio.sleep(delay_s)


def _ranges(response: GenerateResponse) -> list[PlaceholderRange]:
    """Return where the server placed pictures, in prompt order, whatever it calls their modality."""
    placed = sorted((r for ranges in (response.mm_placeholders or {}).values() for r in ranges), key=lambda r: r.offset)
    return [PlaceholderRange(offset=r.offset, length=r.length) for r in placed]


def _check_pictures(response: GenerateResponse, prompt: Prompt, placeholder_ids: frozenset[int], where: str) -> None:
    """Check that every picture has a range, and every placeholder a picture."""
    ids = response.prompt_token_ids
    if ids is None:
        raise InferenceError(
            f"{where}: no prompt_token_ids in the answer. The server must be vLLM 0.30 or newer; for 0.28 and 0.29 "
            "install latepix-vllm beside it."
        )
    ranges = _ranges(response)
    if len(ranges) != len(prompt.images):
        raise InferenceError(f"{where}: {len(prompt.images)} pictures were sent, {len(ranges)} ranges came back.")
    num_covered = sum(sum(token in placeholder_ids for token in ids[r.offset : r.offset + r.length]) for r in ranges)
    num_placeholders = sum(token in placeholder_ids for token in ids)
    if num_covered != num_placeholders:
        raise PlaceholderMismatch(
            f"{where}: the prompt came back with {num_placeholders} picture tokens, but the ranges of its "
            f"{len(ranges)} pictures cover {num_covered}: the others would be blind. Send one placeholder per picture."
        )


def _check_response(response: GenerateResponse, n: int, where: str, last_version: int | None) -> list[Generation]:
    choices = sorted(response.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(n)):
        raise InferenceError(f"{where}: asked for {n} answers, got indices {[c.index for c in choices]}.")
    return [
        Generation(
            prompt_token_ids=response.prompt_token_ids or [],
            ranges=_ranges(response),
            token_ids=choice.token_ids,
            logprobs=_check_logprobs(choice, where),
            finish_reason=_check_finish(choice, where),
            policy_version=_oldest_version(choice, last_version, where),
            policy_spans=_policy_spans(choice),
            kv_transfer_params=response.kv_transfer_params,
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
    if not choice.token_ids:
        raise InferenceError(f"{where}, answer {choice.index}: no token was sampled. See the server's log.")
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


def _policy_spans(choice: Choice) -> tuple[PolicySpan, ...]:
    spans = [(policy_version_of(span.version), span.start, span.end) for span in choice.weight_versions or ()]
    return tuple(PolicySpan(version, start, end) for version, start, end in spans if version is not None)


def _oldest_version(choice: Choice, last_version: int | None, where: str) -> int | None:
    """Return the oldest version that sampled a token; a server that does not say served what it was last given."""
    labels = [span.version for span in choice.weight_versions or ()]
    versions = [policy_version_of(label) for label in labels]
    if last_version is not None and None in versions:
        raise InferenceError(
            f"{where}, answer {choice.index}: sampled from weights {', '.join(labels)}, which this run never gave the "
            f"server (last: {version_label(last_version)}). It was started anew, or serves another run."
        )
    return min((version for version in versions if version is not None), default=last_version)
