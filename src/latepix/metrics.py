"""Named scalars, one JSON object a line: `metrics.jsonl` of a run folder.

Keys are `area/name[/stat]`. Several processes append to one file; a line is written with one system call in append
mode, so lines never mix. Readers join the lines of a step with `read_metrics`.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from latepix.errors import TransportError


class MetricsWriter:
    """Appends the scalars of a step to a JSONL file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise TransportError(
                f"Cannot open {path}: {error.strerror or error}. Choose another output_dir."
            ) from error

    def write(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Append one line. Numbers that are not finite are written as null: JSON has no word for them.

        Raises:
            TransportError: the disk refused.
        """
        row = {
            "step": step,
            **{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()},
        }
        line = msgspec.json.encode(row) + b"\n"
        try:
            if os.write(self._fd, line) == len(line):
                return
            # A part of a line would swallow the next one; the newline keeps the damage to this one.
            os.write(self._fd, b"\n")
            reason = "only a part fitted"
        except OSError as error:
            reason = error.strerror or str(error)
        raise TransportError(
            f"Cannot write {len(line)} bytes to {self._path}: {reason}. Free some space or choose another output_dir."
        )

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class MetricsTail:
    """Reads a metrics file that may still be written, each line once.

    Attributes:
        num_skipped: lines that were damaged and left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.num_skipped = 0
        self._steps: dict[int, dict[str, float]] = {}

    def read(self) -> list[dict[str, float]]:
        """Return the rows so far, joined by step, in the order of the steps; an unfinished last line waits."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.num_skipped += _join(whole.decode("utf-8", errors="replace"), self._steps)
        return [self._steps[step] for step in sorted(self._steps)]


def _join(lines: str, steps: dict[int, dict[str, float]]) -> int:
    """Add lines to their steps; returns how many were damaged."""
    num_skipped = 0
    for line in lines.splitlines():
        try:
            row = json.loads(line)
            step = int(row["step"])
            steps.setdefault(step, {}).update(row)
        except (ValueError, KeyError, TypeError):
            num_skipped += 1
    return num_skipped


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read a metrics file and join its lines by step, in the order of the steps.

    A line that is damaged, such as a last one that was cut off by a crash, is left out; later lines of a step win over
    earlier ones.
    """
    return MetricsTail(path).read()


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far, in bytes.

    Read from `/proc` where there is one: Linux lets `ru_maxrss` begin at the peak of the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
