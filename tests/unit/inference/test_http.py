from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from latepix.errors import ProcessFailed
from latepix.inference.http import remedy_of, server_message, wait_until_healthy
from tests.tiny.servers import closed_url, scripted_server


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"error": {"message": "no such folder", "code": 400}}', "no such folder"),
        (b'{"error": "paused"}', "paused"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body"], "msg": "Field required"}]}', "[{'loc': ['body'], 'msg': 'Field required'}]"),
        (b"Internal Server Error", "Internal Server Error"),
        (b"", ""),
        (b"[1]", "[1]"),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
def test_an_error_answer_is_read_in_whatever_form_it_comes(content: bytes, message: str) -> None:
    assert server_message(content) == message


def test_a_long_error_answer_is_cut() -> None:
    assert len(server_message(b"x" * 10_000)) == 500


@pytest.mark.parametrize(
    ("status", "route", "what"),
    [
        (403, "/inference/v1/generate", "--enable-scale-out"),
        (404, "/inference/v1/generate", "vLLM 0.30 or newer"),
        (404, "/start_weight_update", "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_status_with_a_known_cause_comes_with_the_remedy(status: int, route: str, what: str) -> None:
    assert what in remedy_of(status, route)


def test_a_status_that_may_mean_anything_has_no_remedy() -> None:
    assert remedy_of(500, "/inference/v1/generate") == ""


def test_waiting_ends_when_the_server_is_healthy() -> None:
    answers = iter([503, 503, 200])
    with scripted_server(lambda method, path, body: (next(answers), {})) as server:
        wait_until_healthy(server.url, timeout_s=20)
    assert server.routes == ["GET /health"] * 3


def test_a_server_that_never_comes_up_is_named() -> None:
    url = closed_url()
    with pytest.raises(ProcessFailed, match=rf"at {url} did not become healthy within 0.2 s .*last: .*refused"):
        wait_until_healthy(url, timeout_s=0.2)


def test_a_server_that_stays_ill_is_named() -> None:
    with (
        scripted_server(lambda method, path, body: (503, {})) as server,
        pytest.raises(ProcessFailed, match="last: HTTP 503"),
    ):
        wait_until_healthy(server.url, timeout_s=0.2)


def test_waiting_ends_at_once_when_there_is_no_hope() -> None:
    def check() -> None:
        raise ProcessFailed("it died")

    with pytest.raises(ProcessFailed, match="it died"):
        wait_until_healthy(closed_url(), timeout_s=60, check=check)


def test_waiting_goes_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody listens there: a request that went through it would fail.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with scripted_server(lambda method, path, body: (200, {})) as server:
        wait_until_healthy(server.url, timeout_s=2)


def test_a_port_where_something_else_answers_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def babble() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(1024)
                        connection.sendall(b"SSH-2.0-something\r\n")

        threading.Thread(target=babble, daemon=True).start()
        with pytest.raises(ProcessFailed, match=r"did not become healthy .*last: SSH-2\.0-something"):
            wait_until_healthy(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.3)
        listener.shutdown(socket.SHUT_RDWR)
