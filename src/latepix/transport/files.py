"""Files that are either there in full or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from latepix.errors import TransportError

#: How often a waiting process looks, seconds.
POLL_S = 0.004
_T = TypeVar("_T")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file aside, flush it to the disk, and rename it into place.

    Raises:
        TransportError: the disk refused; says how much was wanted and how much is free. Nothing is left behind.
    """
    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise disk_error(path, error, len(data)) from error


def write_folder(path: Path, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a folder aside, then rename it into place; one that is there already is replaced.

    Raises:
        TransportError: the disk refused. Nothing is left behind.
    """
    partial = path.with_name(path.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        shutil.rmtree(path, ignore_errors=True)
        partial.replace(path)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        cause = _os_error(error)
        if cause is None:
            raise
        raise disk_error(path, cause) from error
    return path


def _os_error(error: Exception) -> OSError | None:
    """Return what the disk said; safetensors only puts it into the text of an error of its own."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def disk_error(path: Path, error: OSError, num_bytes: int | None = None) -> TransportError:
    """Explain a failed write; `num_bytes` is None where its size is not known."""
    what = f"{path}" if num_bytes is None else f"{num_bytes} bytes to {path}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            free = f"{shutil.disk_usage(path.parent).free} bytes are free"
        except OSError:
            free = "free space unknown"
        return TransportError(
            f"The disk is full: writing {what} failed ({free}). Free some space or choose another output_dir."
        )
    return TransportError(f"Cannot write {what}: {error.strerror or error}.")


def wait_for(look: Callable[[], _T | None], *, what: str, timeout_s: float) -> _T:
    """Call `look` until it returns something.

    Args:
        look: returns None while there is nothing.
        what: names what is waited for, for the error.
        timeout_s: seconds until it is given up.
    Raises:
        TransportError: nothing came in time.
    """
    deadline = time.monotonic() + timeout_s
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise TransportError(f"Waited {timeout_s:g} s for {what}, in vain (trainer.wait_timeout_s).")
        time.sleep(POLL_S)
    return found
