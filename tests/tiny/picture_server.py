"""A real HTTP server on a free port of this machine, which answers well or badly."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Reply(NamedTuple):
    """What the server answers.

    Attributes:
        body: bytes of the body.
        status: HTTP status.
        headers: beside `Content-Length`, which they may replace; None leaves a header out.
        piece_bytes: size of the pieces in which the body is sent; 0 sends it at once.
        pause_s: waited before each piece, or until the server closes.
        is_chunked: send the pieces in chunked coding, without a length.
    """

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str | None] = {}
    piece_bytes: int = 0
    pause_s: float = 0.0
    is_chunked: bool = False


class PictureServer:
    """Counts what it is asked.

    Attributes:
        url: `http://127.0.0.1:<port>`.
        requests: path and headers of every request, in order.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.is_closing = threading.Event()

    @property
    def num_requests(self) -> int:
        return len(self.requests)


@contextmanager
def picture_server(pages: Mapping[str, bytes | Reply]) -> Generator[PictureServer]:
    """Serve pages by path while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            page = pages.get(self.path, Reply(status=404))
            reply = page if isinstance(page, Reply) else Reply(page)
            state.requests.append((self.path, dict(self.headers)))
            try:
                self._answer(reply)
            except OSError:
                self.close_connection = True  # the client has gone

        def _answer(self, reply: Reply) -> None:
            self.send_response(reply.status)
            headers: dict[str, str | None] = {"Content-Length": str(len(reply.body))}
            if reply.is_chunked:
                headers = {"Transfer-Encoding": "chunked"}
            for name, value in {**headers, **reply.headers}.items():
                if value is not None:
                    self.send_header(name, value)
            self.end_headers()
            size = reply.piece_bytes or max(1, len(reply.body))
            for start in range(0, len(reply.body), size):
                if reply.pause_s and state.is_closing.wait(reply.pause_s):
                    break
                piece = reply.body[start : start + size]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if reply.is_chunked else piece)
                self.wfile.flush()
            if reply.is_chunked:
                self.wfile.write(b"0\r\n\r\n")
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state = PictureServer(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.is_closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def raw_server(answer: bytes = b"", *, pause_s: float = 0.0) -> Generator[tuple[int, list[bytes]]]:
    """Accept one connection, read once, and answer byte by byte with a pause before each.

    Yields:
        Its port, and a list that gets the first bytes it reads.
    """
    is_closing = threading.Event()
    received: list[bytes] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            received.append(connection.recv(4096))
            try:
                for position in range(len(answer)):
                    if is_closing.wait(pause_s):
                        return
                    connection.sendall(answer[position : position + 1])
            except OSError:
                pass  # the client has gone

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1], received
        finally:
            is_closing.set()
            thread.join(5)
