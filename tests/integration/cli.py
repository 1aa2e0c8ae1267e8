"""`latepix` as a person runs it: commands in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "digits"
#: No model is larger than the tiny one, so nothing here may take longer.
TIMEOUT_S = 120


def start(*args: object) -> subprocess.Popen[str]:
    """Start a command; its environments may be modules of the tests."""
    return subprocess.Popen(
        [sys.executable, "-m", "latepix", *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], *, timeout_s: float = TIMEOUT_S) -> tuple[int, str, str]:
    """Wait for a command; returns its exit status, standard output and standard error."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, out, err


def latepix(*args: object) -> str:
    """Run a command that must succeed; returns its standard output."""
    code, out, err = finish(start(*args))
    assert code == 0, f"exit {code}\n{out}\n{err}"
    return out


def children_of(pid: int) -> dict[str, int]:
    """Return the running children of a launcher: command (`serve`, `train`, `orchestrate`) -> process id."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    found = {}
    for line in listing.splitlines():
        child, parent, *command = line.split()
        if int(parent) == pid and "latepix" in command:
            found[command[command.index("latepix") + 1]] = int(child)
    return found


def is_alive(pid: int) -> bool:
    """Say whether a process exists that has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state) and not state.startswith("Z")


def wait_until(look: Callable[[], bool], *, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
