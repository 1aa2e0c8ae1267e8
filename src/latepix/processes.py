"""Child processes of a run: started with a log file each, watched, and never left behind.

A child gets a pipe as its standard input and ends itself when that pipe closes (`die_with_parent`), so that no process
outlives a launcher that was killed. Children do not see ctrl-C; the launcher stops them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from latepix.errors import ConfigError, ProcessFailed

#: Set to 1 for a child that ends with its launcher.
SUPERVISED = "LATEPIX_SUPERVISED"
_WATCH = "parent-watch"
#: How every error of a process begins in its log.
ERROR_PREFIX = "latepix: error: "


class Child:
    """One process of a run.

    Args:
        name: as people call it, also the name of its log.
        args: arguments of `latepix`.
        logs_dir: folder of the log; made if needed.
        num_threads: OpenMP threads of the process.
        explain: makes an error of the log of a process that is not ours; without, its last line is the error.
    """

    def __init__(
        self,
        name: str,
        args: Sequence[str],
        logs_dir: Path,
        *,
        num_threads: int = 1,
        explain: Callable[[str], str] | None = None,
    ) -> None:
        logs_dir.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._explain = explain
        self.log_path = logs_dir / f"{name}.log"
        self._log = self.log_path.open("wb")
        self._process = subprocess.Popen(
            # -P: a file of the current folder must not stand in for a module of the standard library.
            [sys.executable, "-P", "-m", "latepix", *args],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ
            | {
                SUPERVISED: "1",
                "OMP_NUM_THREADS": str(num_threads),
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "PYTHONUNBUFFERED": "1",
            },
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit status, None while it runs; negative if a signal ended it."""
        return self._process.poll()

    def check(self) -> None:
        """Raise if the process died.

        Raises:
            ProcessFailed: with the process's own error and the path of its log.
        """
        code = self.exit_code
        if code in (None, 0):
            return
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            raise ProcessFailed(f"The {self.name} process was ended by {name}{hint}\nIts log: {self.log_path}")
        raise ProcessFailed(
            f"The {self.name} process failed (exit {code}): {self._last_error()}\nIts log: {self.log_path}"
        )

    @property
    def last_line(self) -> str:
        """What it wrote last."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
                lines = log.read().decode("utf-8", errors="replace").split("\n")
        except OSError:
            # Somebody removed it; the process is none the worse for that.
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def stop(self, *, grace_s: float = 10.0) -> None:
        """End the process and what it started: ask, wait, then kill."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        # vLLM has workers of its own; the process leads their group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin:
            self._process.stdin.close()
        self._log.close()

    def _last_error(self) -> str:
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        at = text.rfind(ERROR_PREFIX)
        if at >= 0:
            return text[at + len(ERROR_PREFIX) :].strip()
        if self._explain is not None:
            return self._explain(text)
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines and shutil.disk_usage(self.log_path).free < 1 << 16:
            return f"the disk of {self.log_path.parent} is full; free some space or choose another output_dir"
        return lines[-1].strip() if lines else "it wrote nothing"


def die_with_parent() -> None:
    """In a child of a run: end this process when the launcher is gone."""
    # Taken out, so that what this process starts itself does not watch an input that is not the launcher's.
    if os.environ.pop(SUPERVISED, None) != "1":
        return

    def watch() -> None:
        # Not sys.stdin: a thread that waits inside its lock would crash the interpreter's own exit.
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name=_WATCH, daemon=True).start()


def is_supervised() -> bool:
    """Whether this process ends with its launcher."""
    return any(thread.name == _WATCH for thread in threading.enumerate())


def bind(host: str, port: int) -> socket.socket:
    """Take an address; port 0 takes a free one.

    Raises:
        ConfigError: it is in use or not ours.
    """
    # With the protocol named, asyncio turns Nagle's algorithm off; without, every small answer may wait 40 ms.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        # Without this, two servers could bind the same port and one of them would fail much later.
        sock.listen()
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"inference.host, inference.port: cannot listen on {host}:{port}: {error.strerror or error}. Stop what "
            "uses the port, choose another one, or set inference.port = 0 for a free one."
        ) from error
    return sock


def free_port(host: str, port: int) -> int:
    """Return `port` if it can be taken, or a free one if it is 0."""
    with bind(host, port) as sock:
        return sock.getsockname()[1]
