"""The routes of the local engine: the same paths and JSON as vLLM's.

One thread owns the engine; the event loop only parses, queues and answers. Requests that arrive together, or while a
batch is running, form the next batch. A weight update is staged first and applied between batches, so a failed one
changes nothing.
"""

from __future__ import annotations

import asyncio
import base64
import queue
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import torch
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from latepix.errors import CheckpointError, LatepixError
from latepix.families.base import ProcessedImage
from latepix.families.facts import local_facts
from latepix.inference.contract import (
    MAX_BODY_BYTES,
    Choice,
    GenerateRequest,
    GenerateResponse,
    Logprobs,
    PixelsResponse,
    Placed,
    ProcessedPixels,
    TokenLogprob,
    Usage,
    WeightVersionSpan,
    version_label,
)
from latepix.inference.facts import Facts
from latepix.inference.local_engine import BadRequest, Completion, LocalEngine, PreparedPrompt
from latepix.metrics import peak_rss_bytes

_Job = tuple[GenerateRequest, "Future[GenerateResponse]"]
_Task = Callable[[], None]


class EngineThread:
    """Runs an engine in a thread of its own: batches of requests, and tasks between batches."""

    def __init__(self, engine: LocalEngine, *, max_batch_size: int, batch_window_s: float) -> None:
        self.engine = engine
        self.weight_version = version_label(0)
        self._max_batch_size = max_batch_size
        self._batch_window_s = batch_window_s
        self._inbox: queue.Queue[_Job | _Task | None] = queue.Queue()
        self._running = threading.Event()
        self._running.set()
        self._staged: dict[str, torch.Tensor] | None = None
        self._is_updating = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are still answered."""
        return self._thread.is_alive()

    def submit(self, request: GenerateRequest) -> Future[GenerateResponse]:
        """Queue a request.

        Raises:
            BadRequest: it asks for more answers than the engine decodes together.
        """
        if request.sampling_params.n > self._max_batch_size:
            raise BadRequest(
                f"n is {request.sampling_params.n}; this server decodes at most {self._max_batch_size} sequences "
                "together (inference.max_batch_size). Send several requests."
            )
        answer: Future[GenerateResponse] = Future()
        self._inbox.put((request, answer))
        return answer

    @property
    def max_batch_size(self) -> int:
        """Most sequences that are decoded together."""
        return self._max_batch_size

    def prepare(self, request: GenerateRequest) -> Future[PreparedPrompt]:
        """Queue the processing of a request's pictures and prompt, without sampling."""
        answer: Future[PreparedPrompt] = Future()

        def run() -> None:
            try:
                answer.set_result(self.engine.prepare(request))
            except Exception as error:
                # Whatever is wrong with the request is told to whoever sent it.
                answer.set_exception(error)

        self._inbox.put(run)
        return answer

    def stop(self) -> None:
        """Finish the running batch and end the thread."""
        self._running.set()
        self._inbox.put(None)
        self._thread.join()

    def pause(self) -> None:
        """Start no further batch; requests wait."""
        self._running.clear()

    def resume(self) -> None:
        """Go on after a pause."""
        self._running.set()

    def start_update(self) -> None:
        """Begin a weight update; forgets one that was not finished."""
        self._staged = None
        self._is_updating = True

    def stage_weights(self, path: Path) -> None:
        """Read new weights aside."""
        if not self._is_updating:
            raise BadRequest("No weight update was started: call /start_weight_update first.")
        self._staged = self.engine.read_weights(path)

    def finish_update(self, weight_version: str | None) -> None:
        """Apply the staged weights between batches, and take over the version."""
        staged, self._staged, self._is_updating = self._staged, None, False
        if staged is None:
            raise BadRequest("No weights were staged: call /start_weight_update and /update_weights first.")
        done: Future[None] = Future()

        def apply() -> None:
            try:
                self.engine.load_weights(staged)
                self.weight_version = weight_version or self.weight_version
                done.set_result(None)
            except Exception as error:
                # Whatever went wrong belongs to the request that asked for the update.
                done.set_exception(error)

        self._inbox.put(apply)
        done.result()

    def _run(self) -> None:
        waiting: list[_Job] = []
        while True:
            item = self._next_item(waiting)
            if item is None:
                return
            if not isinstance(item, list):
                item()
                continue
            batch, room = [], self._max_batch_size
            while waiting and (not batch or waiting[0][0].sampling_params.n <= room):
                batch.append(waiting.pop(0))
                room -= batch[-1][0].sampling_params.n
            self._answer(batch)

    def _next_item(self, waiting: list[_Job]) -> _Task | list[_Job] | None:
        """Return a task, None to stop, or `waiting` once it holds a batch that may run."""
        quiet_until = give_up_at = 0.0
        while True:
            timeout: float | None = None
            if waiting and self._running.is_set():
                timeout = max(0.0, min(quiet_until, give_up_at) - time.monotonic())
            elif waiting:
                timeout = 0.002
            try:
                item = self._inbox.get(timeout=timeout)
            except queue.Empty:
                if self._running.is_set():
                    return waiting
                continue
            if not isinstance(item, tuple):
                return item
            waiting.append(item)
            quiet_until = time.monotonic() + self._batch_window_s
            if len(waiting) == 1:
                give_up_at = time.monotonic() + 5 * self._batch_window_s

    def _answer(self, batch: list[_Job]) -> None:
        prepared: list[tuple[PreparedPrompt, Future[GenerateResponse]]] = []
        for request, answer in batch:
            if answer.cancelled():
                continue
            try:
                prepared.append((self.engine.prepare(request), answer))
            except Exception as error:
                # Whoever asked may be gone by now: a plain set_exception would end this thread.
                _settle(answer, error=error)
        if not prepared:
            return
        try:
            results = self.engine.generate([prompt for prompt, _ in prepared])
        except Exception as error:
            # A batch that cannot be computed fails as a whole; the engine lives on.
            for _, answer in prepared:
                _settle(answer, error=error)
            return
        for (prompt, answer), completions in zip(prepared, results, strict=True):
            _settle(answer, result=_response(prompt, completions, self.weight_version))


def _settle(
    answer: Future[GenerateResponse], *, result: GenerateResponse | None = None, error: Exception | None = None
) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    if error is not None:
        answer.set_exception(error)
    elif result is not None:
        answer.set_result(result)


def _response(prompt: PreparedPrompt, completions: list[Completion], weight_version: str) -> GenerateResponse:
    num_sampled = sum(len(completion.token_ids) for completion in completions)
    num_prompt = len(prompt.token_ids)
    return GenerateResponse(
        request_id=uuid.uuid4().hex,
        created=int(time.time()),
        usage=Usage(prompt_tokens=num_prompt, completion_tokens=num_sampled, total_tokens=num_prompt + num_sampled),
        prompt_token_ids=prompt.token_ids.tolist(),
        mm_placeholders=_placed(prompt) or None,
        choices=[
            Choice(
                index=index,
                token_ids=completion.token_ids,
                logprobs=Logprobs(
                    content=[
                        TokenLogprob(token_id=token, logprob=logprob)
                        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
                    ]
                ),
                finish_reason=completion.finish_reason,
                weight_versions=[WeightVersionSpan(version=weight_version, start=0, end=len(completion.token_ids))],
            )
            for index, completion in enumerate(completions)
        ],
    )


def _placed(prompt: PreparedPrompt) -> dict[str, list[Placed]]:
    placed = [Placed(offset=r.offset, length=r.length) for r in prompt.ranges]
    return {"image": placed} if placed else {}


def _pixels(image: ProcessedImage) -> ProcessedPixels:
    values = image.pixel_values.float().numpy().astype("<f4")
    return ProcessedPixels(
        grid_thw=list(image.grid_thw),
        shape=list(values.shape),
        dtype="float32",
        data=base64.b64encode(values.tobytes()).decode(),
    )


def _facts(engine_thread: EngineThread) -> Facts:
    engine = engine_thread.engine
    return local_facts(
        engine.info.path,
        engine="local",
        dtype=str(engine.model.dtype).removeprefix("torch."),
        max_model_len=engine.max_model_len,
        max_num_seqs=engine_thread.max_batch_size,
        data_parallel_size=1,
        # By vLLM's name: of the distribution that was sampled from, temperature and bans applied.
        logprobs_mode="processed_logprobs",
        weight_version=engine_thread.weight_version,
        weight_transfer="safetensors_dir",
        prefix_caching=False,
    )


def build_app(engine_thread: EngineThread, *, served_model_name: str = "policy") -> Starlette:
    """Build the ASGI app around a running engine."""

    async def generate(request: Request) -> Response:
        body = await _body(request)
        try:
            parsed = msgspec.json.decode(body, type=GenerateRequest)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"The body is not a generate request: {error}.") from error
        return _json(await asyncio.wrap_future(engine_thread.submit(parsed)))

    async def health(request: Request) -> Response:
        if not engine_thread.is_alive:
            return _json(
                {"error": {"message": "The engine's thread has ended; see the server's log."}}, status_code=503
            )
        return _json({"status": "ok", "peak_rss_bytes": peak_rss_bytes()})

    async def models(request: Request) -> Response:
        card = {
            "id": served_model_name,
            "object": "model",
            "root": str(engine_thread.engine.info.path),
            "max_model_len": engine_thread.engine.max_model_len,
        }
        return _json({"object": "list", "data": [card]})

    async def facts(request: Request) -> Response:
        return _json(await run_in_threadpool(_facts, engine_thread))

    async def pixels(request: Request) -> Response:
        body = await _json_body(request)
        try:
            prompt = msgspec.convert(
                {"token_ids": body.get("token_ids"), "content_parts": body.get("content_parts") or []}
                | {"sampling_params": {"max_tokens": 1}},
                GenerateRequest,
            )
        except msgspec.ValidationError as error:
            raise BadRequest(f"The body is not a prompt: {error}.") from error
        prepared = await asyncio.wrap_future(engine_thread.prepare(prompt))
        return _json(
            PixelsResponse(
                prompt_token_ids=prepared.token_ids.tolist(),
                mm_placeholders=_placed(prepared),
                images=[_pixels(image) for _, image in prepared.images],
            )
        )

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/inference/v1/generate", generate, methods=["POST"]),
            Route("/latepix/facts", facts),
            Route("/latepix/pixels", pixels, methods=["POST"]),
            *_weight_routes(engine_thread),
        ],
        exception_handlers={LatepixError: _error_response, Exception: _error_response},
    )


def _weight_routes(engine_thread: EngineThread) -> list[Route]:
    """Build the routes of weight updates."""

    async def pause(request: Request) -> Response:
        engine_thread.pause()
        return _json({"status": "paused"})

    async def resume(request: Request) -> Response:
        engine_thread.resume()
        return _json({"status": "resumed"})

    async def init_transfer(request: Request) -> Response:
        return _json({"message": "Weight transfer initialized"})

    async def start_update(request: Request) -> Response:
        engine_thread.start_update()
        return _json({"message": "Weight update started"})

    async def update_weights(request: Request) -> Response:
        body = await _json_body(request)
        info = body.get("update_info")
        path = info.get("path") if isinstance(info, dict) else None
        if not isinstance(path, str):
            raise BadRequest('The body must be {"update_info": {"path": "<folder with safetensors>"}}.')
        await run_in_threadpool(engine_thread.stage_weights, Path(path))
        return _json({"message": "Weights updated"})

    async def finish_update(request: Request) -> Response:
        version = (await _json_body(request)).get("weight_version")
        if not isinstance(version, str | None):
            raise BadRequest(f"weight_version must be text such as {version_label(3)!r}, got {version!r}.")
        await run_in_threadpool(engine_thread.finish_update, version)
        return _json({"message": "Weight update finished"})

    async def weight_info(request: Request) -> Response:
        return _json({"weight_version": engine_thread.weight_version})

    async def update_version(request: Request) -> Response:
        version = (await _json_body(request)).get("new_version")
        if not isinstance(version, str) or not version:
            raise BadRequest(f"new_version must be text such as {version_label(3)!r}, got {version!r}.")
        engine_thread.weight_version = version
        return _json({"success": True, "new_version": version})

    return [
        Route("/weight_info", weight_info),
        Route("/pause", pause, methods=["POST"]),
        Route("/resume", resume, methods=["POST"]),
        Route("/init_weight_transfer_engine", init_transfer, methods=["POST"]),
        Route("/start_weight_update", start_update, methods=["POST"]),
        Route("/update_weights", update_weights, methods=["POST"]),
        Route("/finish_weight_update", finish_update, methods=["POST"]),
        Route("/update_weight_version", update_version, methods=["POST"]),
    ]


async def _body(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise BadRequest(f"The body is larger than {MAX_BODY_BYTES} bytes.")
        chunks.append(chunk)
    return b"".join(chunks)


async def _json_body(request: Request) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(await _body(request))
    except msgspec.MsgspecError as error:
        raise BadRequest(f"The body is not JSON: {error}.") from error
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    return body


async def _error_response(request: Request, error: Exception) -> Response:
    code = 400 if isinstance(error, (BadRequest, CheckpointError)) else 500
    body = {"error": {"message": str(error), "type": type(error).__name__, "code": code}}
    return _json(body, status_code=code)


def _json(body: Any, status_code: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status_code, media_type="application/json")
