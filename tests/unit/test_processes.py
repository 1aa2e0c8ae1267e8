from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from latepix.errors import ConfigError, ProcessFailed
from latepix.processes import ERROR_PREFIX, Child, bind, free_port


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.stop()


def wait_until_ended(child: Child, *, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while child.exit_code is None:
        assert time.monotonic() < deadline, child.log_path.read_text(encoding="utf-8")
        time.sleep(0.02)


def test_a_child_that_dies_is_reported_with_its_own_error(tmp_path: Path, children: list[Child]) -> None:
    # The real command, on a model folder that is not there.
    args = ["serve", "--model.path", str(tmp_path / "no-model"), "--output_dir", str(tmp_path / "run")]
    child = Child("inference", args, tmp_path / "logs")
    children.append(child)
    child.check()
    wait_until_ended(child)
    with pytest.raises(ProcessFailed) as caught:
        child.check()
    message = str(caught.value)
    assert message.startswith(f"The inference process failed (exit 1): Model folder {tmp_path}/no-model does not exist")
    assert "latepix tiny --family qwen3_vl" in message
    assert message.endswith(f"Its log: {tmp_path}/logs/inference.log")
    assert "Traceback" not in message


def test_a_child_without_an_error_of_ours_is_reported_with_its_last_line(tmp_path: Path, children: list[Child]) -> None:
    child = Child("trainer", ["train", "--help-me"], tmp_path / "logs")
    children.append(child)
    wait_until_ended(child)
    child.log_path.write_text("Traceback\n  line 3\nValueError: surprise\n\n", encoding="utf-8")
    with pytest.raises(ProcessFailed, match=r"^The trainer process failed \(exit \d\): ValueError: surprise\n"):
        child.check()


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Return a child that failed and whose log is explained; tests write the log."""
    folder = tmp_path_factory.mktemp("failed")
    child = Child("inference", ["serve", "--help-me"], folder, explain=lambda text: f"explained {len(text)}")
    wait_until_ended(child)
    yield child
    child.stop()


def test_a_log_that_is_not_ours_is_explained(failed: Child) -> None:
    failed.log_path.write_text("ValueError: surprise\n", encoding="utf-8")
    with pytest.raises(ProcessFailed, match=r"^The inference process failed \(exit \d\): explained 21\nIts log: "):
        failed.check()


def test_an_error_of_ours_needs_no_explanation(failed: Child) -> None:
    failed.log_path.write_text(f"loading\n{ERROR_PREFIX}the port is taken\n", encoding="utf-8")
    with pytest.raises(ProcessFailed, match=r"^The inference process failed \(exit \d\): the port is taken\nIts log: "):
        failed.check()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Return a child that ended well; tests write its log."""
    child = Child("help", ["--help"], tmp_path_factory.mktemp("ended"))
    wait_until_ended(child)
    yield child
    child.stop()


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (b"", ""),
        (b"\n \n", ""),
        (b"one\n  two  \n\n", "two"),
        (b"one\nhalf a li", "half a li"),
        (b"x" * 10_000 + b"\nlast\n", "last"),
        (b"\xff" * 10_000, "\ufffd" * 4096),
    ],
    ids=["empty", "blank", "lines", "unfinished", "long", "bytes"],
)
def test_the_last_line_of_a_log(ended: Child, log: bytes, expected: str) -> None:
    ended.log_path.write_bytes(log)
    assert ended.last_line == expected


# What vLLM's Python does here: says what it has, and when it serves, starts a process of its own that holds a pipe.
FAKE_VLLM = """#!/bin/sh
if [ "$2" = "-c" ]; then
    echo '{"version": "0.32.0", "is_cpu": false, "plugin": "0.1.0"}'
    exit
fi
exec 3> "%s"
sleep 600 &
echo "worker started"
wait
"""


def start_with_worker(folder: Path, children: list[Child], *, model: Path, pipe: Path) -> Child:
    """Start `latepix serve`, which becomes a process with a worker below it."""
    python = folder / "python"
    python.write_text(FAKE_VLLM % pipe, encoding="utf-8")
    python.chmod(0o755)
    args = ["serve", "--model.path", str(model), "--output_dir", str(folder / "run"), "--inference.engine", "vllm"]
    child = Child("inference", [*args, "--inference.vllm.python", str(python)], folder / "logs")
    children.append(child)
    deadline = time.monotonic() + 60
    while child.last_line != "worker started":
        child.check()
        assert time.monotonic() < deadline, child.log_path.read_text(encoding="utf-8")
        time.sleep(0.02)
    return child


def test_stopping_a_child_ends_what_it_started(tiny_model: Path, tmp_path: Path, children: list[Child]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        child = start_with_worker(tmp_path, children, model=tiny_model, pipe=pipe)
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
        child.stop()
        # The pipe ends once nobody holds it any more.
        assert select.select([reader], [], [], 20)[0] == [reader]
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


def test_a_child_that_ended_well_is_no_failure(tmp_path: Path, children: list[Child]) -> None:
    child = Child("help", ["--help"], tmp_path / "logs")
    children.append(child)
    wait_until_ended(child)
    child.check()
    assert child.exit_code == 0
    assert "usage: latepix COMMAND" in child.log_path.read_text(encoding="utf-8")


def test_a_child_that_was_killed_is_reported_with_the_signal(tmp_path: Path, children: list[Child]) -> None:
    child = Child("trainer", ["train", "--help"], tmp_path / "logs")
    children.append(child)
    os.kill(child.pid, signal.SIGKILL)
    wait_until_ended(child)
    with pytest.raises(ProcessFailed, match=r"^The trainer process was ended by SIGKILL \(out of memory\?\)\n"):
        child.check()


def test_stopping_twice_is_fine(tmp_path: Path) -> None:
    child = Child("help", ["--help"], tmp_path / "logs")
    child.stop()
    child.stop()
    assert child.exit_code is not None


# What a child of a run does once it is up.
WATCHED = """
import time
from latepix.processes import die_with_parent, is_supervised
die_with_parent()
print("up", is_supervised(), flush=True)
time.sleep(60)
"""


def start_watched(*, supervised: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"LATEPIX_SUPERVISED": supervised},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up %r\n" % (supervised == "1")
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None and not stream.closed:
            stream.close()


def test_a_child_dies_when_its_parent_closes_the_pipe() -> None:
    process = start_watched(supervised="1")
    try:
        assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=20) == -signal.SIGKILL
    finally:
        end(process)


def test_a_command_that_a_person_started_does_not_watch_its_input() -> None:
    process = start_watched(supervised="0")
    try:
        assert process.stdin is not None
        process.stdin.close()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)
    finally:
        end(process)


def test_a_port_in_use_is_named() -> None:
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"inference.port: cannot listen on 127.0.0.1:{port}: Address already in use"
        ):
            bind("127.0.0.1", port)
        with pytest.raises(ConfigError, match=r"set inference.port = 0 for a free one"):
            free_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot listen on {host}:0: "):
        bind(host, 0)


def test_a_free_port_can_be_taken() -> None:
    port = free_port("127.0.0.1", 0)
    assert 1024 <= port <= 65535
    assert free_port("127.0.0.1", port) == port
    with bind("127.0.0.1", port) as sock:
        assert isinstance(sock, socket.socket)


def test_a_run_on_a_port_in_use_ends_with_one_message(tmp_path: Path, children: list[Child]) -> None:
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        args = [
            "rl",
            "--model.path",
            str(tmp_path),
            "--output_dir",
            str(tmp_path / "run"),
            "--inference.port",
            str(port),
        ]
        child = Child("rl", args, tmp_path / "logs")
        children.append(child)
        wait_until_ended(child)
    with pytest.raises(ProcessFailed, match=rf"cannot listen on 127.0.0.1:{port}"):
        child.check()
    assert not (tmp_path / "run").exists()
