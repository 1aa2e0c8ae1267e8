"""Run folders, and what several commands need to begin: the picture door and the summary."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from latepix.config.schema import ImagesConfig, RunConfig
from latepix.errors import ConfigError
from latepix.families.model_info import ModelInfo
from latepix.metrics import read_metrics
from latepix.trace.ingress import ImageAccess, ImageLimits, ImageSource, InlineImage, ingest_image
from latepix.transport.files import write_bytes
from latepix.transport.handshake import HandshakeFolder

#: What is played in a run, as its failures are counted in the metrics.
_AREAS = ("rollout", "eval", "final_eval")


@contextlib.contextmanager
def new_run_folder(path: Path) -> Generator[Path]:
    """Make a run folder and keep others out of it while it is used.

    A run that was refused at its start (server and trainer do not fit, say) does not count.

    Raises:
        ConfigError: it holds a run already, another process uses it, or it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "run.lock").open("w")
    except OSError as error:
        raise ConfigError(f"output_dir: cannot make {path}: {error.strerror or error}.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"output_dir: another run uses {path} just now. Choose another folder.") from error
        metrics = path / "metrics.jsonl"
        if metrics.exists():
            if metrics.stat().st_size:
                raise ConfigError(
                    f"output_dir: {path} already holds a run (it has a metrics.jsonl). Choose another folder, or "
                    f"remove {path}."
                )
            _clear_refused(path)
        yield path


def _clear_refused(path: Path) -> None:
    """Remove what a run left that was refused before it measured anything, so that it can be tried again there."""
    if (path / "handshake").exists():
        HandshakeFolder(path).clear()
    shutil.rmtree(path / "traces", ignore_errors=True)
    for name in ("quarantine.jsonl", "summary.json", "report.html"):
        (path / name).unlink(missing_ok=True)


def picture_door(images: ImagesConfig, info: ModelInfo) -> Callable[[ImageSource], InlineImage]:
    """Return `ingest_image` with a run's limits, the grid of its model, and the folders and hosts it may read from."""
    limits = ImageLimits(
        max_bytes=images.max_bytes, max_pixels=images.max_pixels, max_aspect_ratio=images.max_aspect_ratio
    )
    fit = info.grid if images.fit else None
    access = ImageAccess(
        folders=images.allow_folders,
        hosts=images.allow_hosts,
        allow_private=images.allow_private_addresses,
        timeout_s=images.fetch_timeout_s,
    )
    return lambda source: ingest_image(source, limits=limits, fit=fit, access=access)


def write_summary(config: RunConfig, *, wall_s: float, error: str | None = None) -> dict[str, Any]:
    """Boil a run down to `summary.json` and return it.

    Args:
        config: of the run.
        wall_s: seconds the command took, start-up included.
        error: why the run did not come to its end; None if it did.
    Raises:
        TransportError: the disk refused.
    """
    rows = read_metrics(config.output_dir / "metrics.jsonl")
    steps = [row for row in rows if "loss/mismatch_kl/mean" in row]
    finals = [row["final_eval/reward/mean"] for row in rows if "final_eval/reward/mean" in row]
    played = [row for row in rows if "batch/samples/count" in row]
    num_samples = sum(row["batch/samples/count"] for row in played)
    summary = {
        "error": error,
        "steps": len(steps),
        "reward_first": played[0].get("rollout/reward/mean") if played else None,
        "reward_last": played[-1].get("rollout/reward/mean") if played else None,
        "eval_before": finals[0] if finals else None,
        "eval_after": finals[-1] if finals else None,
        "mismatch_kl_mean": _mean([row["loss/mismatch_kl/mean"] for row in steps]),
        "mismatch_kl_max": max((row["loss/mismatch_kl/mean"] for row in steps), default=None),
        "num_traces": int(sum(row["rollout/traces/count"] for row in played)),
        "num_quarantined": int(sum(row.get(f"{area}/failed/count", 0) for row in rows for area in _AREAS)),
        "wall_s": wall_s,
        "samples_per_s": num_samples / max(1e-9, sum(row["time/step_s"] for row in played)),
        "wire_bytes_per_sample": sum(row["batch/bytes"] for row in played) / max(1, num_samples),
        "peak_rss_bytes": {
            process: int(max((row.get(f"process/{process}/peak_rss_bytes", 0) for row in rows), default=0))
            for process in ("orchestrator", "inference", "trainer")
        },
    }
    write_bytes(config.output_dir / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
    return summary


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
