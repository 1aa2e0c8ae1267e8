"""Stand-ins for the inference server: a client without HTTP, and a scripted HTTP server."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from latepix.families.model_info import ModelInfo
from latepix.inference.client import ANYWHERE, Generation, InferenceClient, Prompt, Routing, Sampling
from latepix.trace.refs import PlaceholderRange

#: What a scripted server does with a request: (method, path, body) -> (status, JSON).
Answer = Callable[[str, str, Any], tuple[int, Any]]


class FakeClient(InferenceClient):
    """Answers with given tokens and no server; expands pictures like the model would.

    Args:
        info: of the model that is played.
        replies: sampled ids of one answer after another.
        change: alters an answer, to play a server that is wrong.
    """

    def __init__(
        self,
        *,
        info: ModelInfo,
        replies: list[list[int]],
        change: Callable[[Generation], Generation] = lambda generation: generation,
    ) -> None:
        super().__init__("http://127.0.0.1:9", stop_ids=info.stop_ids, banned_ids=info.banned_ids)
        self._info = info
        self._replies = list(replies)
        self._change = change
        self.prompts: list[Prompt] = []
        self.samplings: list[Sampling] = []

    async def generate(self, prompt: Prompt, sampling: Sampling, routing: Routing = ANYWHERE) -> Generation:
        """Answer with the next reply."""
        self.prompts.append(prompt)
        self.samplings.append(sampling)
        reply = self._replies.pop(0)
        expanded, ranges = self._info.expand(prompt.token_ids, prompt.images)
        return self._change(
            Generation(
                prompt_token_ids=expanded,
                ranges=ranges,
                token_ids=reply,
                logprobs=[-0.5] * len(reply),
                finish_reason="stop" if reply[-1] in self._info.stop_ids else "length",
                policy_version=3,
            )
        )


def lengthen_last_picture(generation: Generation) -> Generation:
    """Answer like a server whose processor makes the last picture one token longer, consistently."""
    *others, last = generation.ranges
    ids = generation.prompt_token_ids
    return msgspec.structs.replace(
        generation,
        prompt_token_ids=[*ids[: last.offset], ids[last.offset], *ids[last.offset :]],
        ranges=[*others, PlaceholderRange(offset=last.offset, length=last.length + 1)],
    )


class ScriptedServer:
    """A real HTTP server on a free port of loopback that answers what it is told to and remembers what it was sent.

    Attributes:
        answer: decides on each request; may be replaced at any time.
        requests: (method, path, body) of every request so far.
        headers: of the same requests.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Headers and body in one write: in two, the second waits 40 ms for the acknowledgement of the first.
            wbufsize = -1

            def do_GET(self) -> None:
                self._serve()

            def do_POST(self) -> None:
                self._serve()

            def _serve(self) -> None:
                data = self.rfile.read(int(self.headers.get("content-length", 0)))
                body = json.loads(data) if data else None
                outer.requests.append((self.command, self.path, body))
                outer.headers.append(dict(self.headers))
                status, content = outer.answer(self.command, self.path, body)
                payload = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def routes(self) -> list[str]:
        """`METHOD path` of every request so far."""
        return [f"{method} {path}" for method, path, _ in self.requests]

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def scripted_server(answer: Answer) -> Generator[ScriptedServer]:
    """Run a scripted server."""
    server = ScriptedServer(answer)
    try:
        yield server
    finally:
        server.close()


def closed_url() -> str:
    """Return the address of a port on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"
