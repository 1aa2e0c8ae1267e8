"""Run folder -> `report.html`: one file, no network, opens from disk.

Text of rollouts reaches the page only through the template engine's escaping, data for the script only as escaped
JSON, and a content security policy lets nothing run but the page's own script, named by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from latepix.errors import TransportError
from latepix.report.charts import CHARTS, draw_chart
from latepix.report.collect import RunReport, Series, collect_run, token_writer
from latepix.report.numbers import Unit, format_number, format_value
from latepix.report.views import view_source

_HERE = Path(__file__).parent


class Figure(msgspec.Struct, frozen=True):
    """A headline number: what it is, the number, and a remark in small print."""

    label: str
    value: str
    remark: str = ""


def write_report(run_dir: Path, *, max_rollouts: int = 240) -> Path:
    """Write `report.html` into a run folder, replacing one that is there.

    Args:
        run_dir: the folder; it may be half written.
        max_rollouts: rollouts to show, over all steps and evaluations together.
    Returns:
        The path of the page.
    Raises:
        ConfigError: `run_dir` is not a run folder.
        TransportError: the disk refused, for example because it is full.
    """
    run_dir = Path(run_dir)
    page = render_report(collect_run(run_dir, max_rollouts=max_rollouts))
    path = run_dir / "report.html"
    partial = path.with_suffix(".html.tmp")
    try:
        partial.write_bytes(page.encode("utf-8", "replace"))
        partial.replace(path)
    except OSError as error:
        raise TransportError(
            f"Cannot write the report to {path}: {error.strerror}. Free some space or make the folder writable."
        ) from error
    return path


def render_report(report: RunReport) -> str:
    """Return the page of a run."""
    style = (_HERE / "static" / "report.css").read_text(encoding="utf-8")
    script = (_HERE / "static" / "report.js").read_text(encoding="utf-8")
    write_token = token_writer(_dig(report.config, "model", "path"))
    charts = [chart for spec in CHARTS if (chart := draw_chart(spec, report.series)) is not None]
    # Markup marks our own files as trusted; nothing that came out of a run is ever wrapped in it.
    return _template().render(
        report=report,
        subtitle=_subtitle(report),
        held_out=_held_out(report),
        figures=_figures(report),
        charts=charts,
        hover=[chart.hover for chart in charts],
        sources=[view_source(source, report.pictures, write_token) for source in report.sources],
        settings=_flatten(report.config),
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("template.html.j2")


def _subtitle(report: RunReport) -> list[str]:
    steps = report.summary.get("steps") or _num_steps(report)
    planned = report.config.get("steps")
    parts = [
        _dig(report.config, "model", "path"),
        _dig(report.config, "environment", "type"),
        f"{steps:,} of {planned:,} steps" if isinstance(planned, int) and planned != steps else f"{steps:,} steps",
    ]
    if "seed" in report.config:
        parts.append(f"seed {report.config['seed']}")
    return [str(part) for part in parts if part]


def _num_steps(report: RunReport) -> int:
    trained = report.series.get("loss/total", Series())
    return trained.steps[-1] + 1 if trained.steps else 0


def _held_out(report: RunReport) -> tuple[str, str] | None:
    """Return held-out reward (before, after); the one before may be empty."""
    series = report.series.get("eval/reward/mean", Series())
    before = report.summary.get("eval_before", series.values[0] if series.values else None)
    after = report.summary.get("eval_after", series.values[-1] if series.values else None)
    if not isinstance(after, int | float):
        return None
    return (f"{before:.3f}" if isinstance(before, int | float) else "", f"{after:.3f}")


def _figures(report: RunReport) -> list[Figure]:
    def number(key: str, fallback: float | None, unit: Unit = "") -> str:
        value = report.summary.get(key, fallback)
        if isinstance(value, Mapping):
            value = sum(value.values())
        return format_value(value, unit) if isinstance(value, int | float) else ""

    def of(key: str) -> tuple[float, ...]:
        return report.series.get(key, Series()).values

    def mean(key: str) -> float | None:
        values = of(key)
        return sum(values) / len(values) if values else None

    memory = [max(of(key)) for key in report.series if key.startswith("process/") and key.endswith("peak_rss_bytes")]
    quarantined = sum(reason.count for reason in report.quarantine)
    highest = number("mismatch_kl_max", max(of("loss/mismatch_kl/max"), default=None))
    rewards = of("rollout/reward/mean")
    first = number("reward_first", rewards[0] if rewards else None)
    figures = [
        Figure(
            "training reward",
            number("reward_last", rewards[-1] if rewards else None),
            f"from {first} in the first step" if first else "",
        ),
        Figure(
            "mismatch KL, mean",
            number("mismatch_kl_mean", mean("loss/mismatch_kl/mean")),
            f"max {highest}" if highest else "",
        ),
        Figure("samples per s", number("samples_per_s", mean("perf/samples_per_s")), "training included"),
        Figure(
            "bytes per sample",
            number("wire_bytes_per_sample", mean("batch/bytes_per_sample"), "B"),
            "all that travels to the trainer",
        ),
        Figure("peak memory", number("peak_rss_bytes", sum(memory) if memory else None, "B"), "all processes"),
        Figure("wall time", number("wall_s", None, "s")),
        Figure("quarantined", number("num_quarantined", quarantined), _of_all(report)),
    ]
    return [figure for figure in figures if figure.value]


def _of_all(report: RunReport) -> str:
    num_traces = report.summary.get("num_traces")
    return f"of {format_number(num_traces)} rollouts" if isinstance(num_traces, int) else "failed rollouts"


def _dig(config: Mapping[str, Any], *keys: str) -> str | None:
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else None


def _flatten(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            rows += _flatten(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
    return rows
