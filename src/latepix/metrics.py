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


class MetricsWriter:
    """Appends the scalars of a step to a JSONL file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Append one line. Numbers that are not finite are written as null: JSON has no word for them."""
        row = {
            "step": step,
            **{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()},
        }
        os.write(self._fd, msgspec.json.encode(row) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read a metrics file and join its lines by step, in the order of the steps.

    A last line that was cut off by a crash is left out; later lines of a step win over earlier ones.
    """
    steps: dict[int, dict[str, float]] = {}
    if not path.exists():
        return []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        steps.setdefault(int(row["step"]), {}).update(row)
    return [steps[step] for step in sorted(steps)]


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
