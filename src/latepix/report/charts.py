"""Series of metrics -> curves, as paths and tick positions that a template can write down.

Pure. Everything is measured in a square of 1000 x 1000 with y downwards (the SVG stretches with the page and its
strokes do not), ticks in per cent. Hover texts are made here too, so that the page's script holds no number format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from latepix.report.collect import Series
from latepix.report.numbers import Unit, format_power, format_value

#: Longer series are averaged down to this many points per curve.
MAX_POINTS = 600
_SIZE = 1000.0
#: Spans below it have no ticks: their quarters and logarithms leave floating point.
_TINY = 1e-300


class LineSpec(msgspec.Struct, frozen=True):
    """One curve: the metric, its name in the legend, its colour (a CSS class) and how it is drawn."""

    key: str
    label: str
    color: str = "blue"
    style: Literal["line", "trend", "points"] = "line"


class ChartSpec(msgspec.Struct, frozen=True):
    """One chart.

    Attributes:
        title, hint: heading, and what to look for.
        lines: curves; those without data are left out.
        scale: `stacked` lays areas on each other; `log` is to base ten; `unit` starts at 0 and ends at 1 if it can.
        unit: of the values.
        reference: a value marked by a line if it is in view, with its label.
    """

    title: str
    hint: str
    lines: tuple[LineSpec, ...]
    scale: Literal["linear", "zero", "unit", "log", "stacked"] = "linear"
    unit: Unit = ""
    reference: tuple[float, str] | None = None


class Tick(msgspec.Struct, frozen=True):
    """A labelled place on an axis, in per cent from the left or from the top."""

    at: float
    label: str


class Curve(msgspec.Struct, frozen=True):
    """A drawn line, area or row of points, with its latest value for the legend."""

    label: str
    color: str
    style: Literal["line", "faint", "points", "area"]
    path: str
    last: str


class Chart(msgspec.Struct, frozen=True):
    """A chart, ready to be written as SVG and HTML.

    Attributes:
        hover: for the script: `x` (per cent), `step`, and per curve `label`, `color`, `y` (per cent or null), `text`.
    """

    title: str
    hint: str
    curves: tuple[Curve, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    references: tuple[Tick, ...]
    hover: dict[str, Any]


def _stages(*stages: tuple[str, str, str]) -> tuple[LineSpec, ...]:
    return tuple(LineSpec(f"time/{key}_s", label, color) for key, label, color in stages)


#: The charts of a run, in reading order.
CHARTS = (
    ChartSpec(
        "Reward",
        "Mean over the rollouts of a step; held-out tasks are played greedily",
        (
            LineSpec("rollout/reward/mean", "training", "blue", "trend"),
            LineSpec("eval/reward/mean", "held-out", "orange", "points"),
        ),
        "unit",
    ),
    ChartSpec(
        "Mismatch KL",
        "Server against trainer, nats per trained token; log scale",
        (
            LineSpec("loss/mismatch_kl/mean", "mean", "blue"),
            LineSpec("loss/mismatch_kl/max", "max", "orange"),
        ),
        "log",
        reference=(0.015, "threshold 0.015"),
    ),
    ChartSpec("Entropy", "Of the policy, nats per sampled token", (LineSpec("loss/entropy/mean", "mean"),), "zero"),
    ChartSpec(
        "Importance ratio",
        "Trainer's probability over the server's",
        (
            LineSpec("loss/importance_ratio/mean", "mean", "blue"),
            LineSpec("loss/importance_ratio/max", "max", "orange"),
        ),
        unit="ratio",
    ),
    ChartSpec("Gradient norm", "Before clipping", (LineSpec("optim/grad_norm", "norm"),), "zero"),
    ChartSpec("Loss", "What the optimizer steps on", (LineSpec("loss/total", "loss"),)),
    ChartSpec(
        "Orchestrator time",
        "Per step, by stage; grey is waiting",
        _stages(
            ("generate", "generate", "blue"), ("pack", "pack", "teal"), ("wait_weights", "wait for weights", "grey")
        ),
        "stacked",
        "s",
    ),
    ChartSpec(
        "Trainer time",
        "Per step, by stage; grey is waiting",
        _stages(
            ("materialize", "materialize", "teal"),
            ("train", "train", "blue"),
            ("publish", "publish", "orange"),
            ("wait_batch", "wait for batch", "grey"),
        ),
        "stacked",
        "s",
    ),
    ChartSpec(
        "Samples per second",
        "The whole loop, training included",
        (LineSpec("perf/samples_per_s", "samples"),),
        "zero",
        "1/s",
    ),
    ChartSpec(
        "Bytes per sample",
        "Orchestrator to trainer: tokens, references, each picture once",
        (LineSpec("batch/bytes_per_sample", "on the wire"),),
        "zero",
        "B",
    ),
    ChartSpec(
        "Tokens per rollout",
        "Mean over the rollouts of a step",
        (
            LineSpec("rollout/prompt_tokens/mean", "prompt", "blue"),
            LineSpec("rollout/completion_tokens/mean", "completion", "orange"),
        ),
        "zero",
    ),
    ChartSpec(
        "Shares",
        "Of groups, rollouts and trained tokens",
        (
            LineSpec("rollout/zero_spread_groups/frac", "groups without spread", "blue"),
            LineSpec("rollout/truncated/frac", "cut at the limit", "orange"),
            LineSpec("loss/clipped/frac", "clipped or masked", "teal"),
        ),
        "zero",
        "frac",
    ),
)


def draw_chart(spec: ChartSpec, series: Mapping[str, Series]) -> Chart | None:
    """Draw a chart, or None if the run has no data for it."""
    lines = [(line, series[line.key]) for line in spec.lines if line.key in series]
    if not lines:
        return None
    steps = sorted({step for _, data in lines for step in data.steps})
    first, last = steps[0], max(steps[-1], steps[0] + 1)
    if spec.scale == "stacked":
        lines = [(line, _on_all(data, steps)) for line, data in lines]
    lines = [(line, thin(data)) for line, data in lines]
    heights = _stack([data for _, data in lines]) if spec.scale == "stacked" else [data.values for _, data in lines]
    axis = _Axis.fit([value for values in heights for value in values], spec.scale, spec.unit)

    def place_x(step: float) -> float:
        return (step - first) / (last - first)

    curves: list[Curve] = []
    hover = []
    for index, (line, data) in enumerate(lines):
        xs = [place_x(step) for step in data.steps]
        ys = [axis.place(value) for value in heights[index]]
        text = format_value(data.values[-1], spec.unit)
        floor = [axis.place(value) for value in heights[index - 1]] if index else [1.0] * len(xs)
        curves += _curves(line, data, xs, ys, floor, text, axis, is_area=spec.scale == "stacked")
        hover.append(_hover(line, data, ys, spec.unit))
    if spec.scale == "stacked":
        curves.reverse()
        hover.reverse()
    ticks_x = [Tick(round(100 * place_x(step), 3), f"{step:,}") for step in _step_ticks(first, last)]
    reference = spec.reference
    return Chart(
        title=spec.title,
        hint=spec.hint,
        curves=tuple(curves),
        x_ticks=tuple(ticks_x),
        y_ticks=axis.ticks,
        references=(Tick(round(100 * axis.place(reference[0]), 3), reference[1]),)
        if reference and axis.low <= axis.map(reference[0]) <= axis.high
        else (),
        hover={"first": first, "last": last, "curves": hover},
    )


def _curves(
    line: LineSpec,
    data: Series,
    xs: Sequence[float],
    ys: Sequence[float],
    floor: Sequence[float],
    text: str,
    axis: _Axis,
    *,
    is_area: bool,
) -> list[Curve]:
    if is_area:
        ring = list(zip(xs, ys, strict=True)) + list(zip(xs, floor, strict=True))[::-1]
        return [Curve(line.label, line.color, "area", _path(ring) + "Z", text)]
    if line.style == "points":
        return [
            Curve(line.label, line.color, "faint", _path(list(zip(xs, ys, strict=True))), ""),
            Curve(line.label, line.color, "points", _dots(xs, ys), text),
        ]
    if line.style == "trend" and len(xs) >= 20:
        trend = [axis.place(value) for value in moving_mean(data.values, 2 * (len(xs) // 40) + 3)]
        return [
            Curve(line.label, line.color, "faint", _path(list(zip(xs, ys, strict=True))), ""),
            Curve(line.label, line.color, "line", _path(list(zip(xs, trend, strict=True))), text),
        ]
    drawn = _dots(xs, ys) if len(xs) == 1 else _path(list(zip(xs, ys, strict=True)))
    return [Curve(line.label, line.color, "points" if len(xs) == 1 else "line", drawn, text)]


def _hover(line: LineSpec, data: Series, ys: Sequence[float], unit: Unit) -> dict[str, Any]:
    return {
        "label": line.label,
        "color": line.color,
        "isSparse": line.style == "points",
        "step": list(data.steps),
        "y": [round(100 * y, 2) for y in ys],
        "text": [format_value(value, unit) for value in data.values],
    }


class _Axis(msgspec.Struct, frozen=True):
    low: float
    high: float
    is_log: bool
    ticks: tuple[Tick, ...] = ()

    @classmethod
    def fit(cls, values: Sequence[float], scale: str, unit: Unit) -> _Axis:
        positive = [value for value in values if value > 0]
        if scale == "log" and positive:
            return cls._log(math.log10(min(positive)), math.log10(max(positive)))
        low, high = min(values), max(values)
        if scale == "unit" and low >= 0 and high <= 1:
            low, high = 0.0, 1.0
        elif scale in ("unit", "zero", "stacked"):
            low, high = min(low, 0.0), max(high, 0.0)
        if high - low <= max(_TINY, 1e-12 * max(abs(low), abs(high))):
            pad = abs(low) * 0.1 if abs(low) > _TINY else 1.0
            low, high = (low, high + pad) if low == 0 else (low - pad, high + pad)
        step = _nice_step((high - low) / 4)
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        count = round((high - low) / step)
        at = [low + step * index for index in range(count + 1)]
        ticks = [
            Tick(round(100 * (1 - index / count), 3), _tick_label(value, step, unit)) for index, value in enumerate(at)
        ]
        return cls(low, high, False, tuple(ticks))

    @classmethod
    def _log(cls, smallest: float, largest: float) -> _Axis:
        low, high = math.floor(smallest), math.ceil(largest)
        high = max(high, low + 1)
        every = max(1, math.ceil((high - low) / 5))
        ticks = [
            Tick(round(100 * (1 - (exponent - low) / (high - low)), 3), format_power(exponent))
            for exponent in range(low, high + 1, every)
        ]
        return cls(float(low), float(high), True, tuple(ticks))

    def map(self, value: float) -> float:
        if not self.is_log:
            return value
        return math.log10(value) if value > 0 else self.low

    def place(self, value: float) -> float:
        """Return how far below the top, 0 to 1."""
        share = (self.map(value) - self.low) / (self.high - self.low)
        return 1 - min(1.0, max(0.0, share))


def _tick_label(value: float, step: float, unit: Unit) -> str:
    if abs(value) < step * 1e-6:
        return "0"
    digits = next((n for n in range(7) if abs(step * 10**n - round(step * 10**n)) < 1e-6), 7)
    if unit in ("", "1/s", "ratio") and step >= 1e-4 and abs(value) < 1e6:
        return f"{value:,.{digits}f}"
    if unit == "ratio":
        # Ratios that differ from 1 by less than a label shows are told by their distance from 1.
        return "1" if abs(value - 1) < step * 1e-6 else f"1{value - 1:+.0e}"
    return format_value(value, "" if unit == "1/s" else unit)


def _nice_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= raw * (1 - 1e-9))


def _step_ticks(first: int, last: int) -> list[int]:
    step = max(1, round(_nice_step((last - first) / 4)))
    start = math.ceil(first / step) * step
    return list(range(start, last + 1, step))


def thin(data: Series, max_points: int = MAX_POINTS) -> Series:
    """Average neighbours of a long series; a short one stays as it is."""
    size = math.ceil(len(data.steps) / max_points)
    if size <= 1:
        return data
    spans = range(0, len(data.steps), size)
    means = [data.values[start : start + size] for start in spans]
    return Series(
        steps=tuple(data.steps[start] for start in spans),
        values=tuple(sum(values) / len(values) for values in means),
    )


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the centred moving mean over an odd window; at both ends, over the part of it that has values."""
    means = []
    half = window // 2
    for index in range(len(values)):
        span = values[max(0, index - half) : index + half + 1]
        means.append(sum(span) / len(span))
    return means


def _on_all(data: Series, steps: Sequence[int]) -> Series:
    known = dict(zip(data.steps, data.values, strict=True))
    return Series(steps=tuple(steps), values=tuple(known.get(step, 0.0) for step in steps))


def _stack(data: Sequence[Series]) -> list[tuple[float, ...]]:
    total = [0.0] * len(data[0].steps)
    heights = []
    for item in data:
        total = [below + value for below, value in zip(total, item.values, strict=True)]
        heights.append(tuple(total))
    return heights


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_SIZE * x:.1f} {_SIZE * y:.1f}" for x, y in points)


def _dots(xs: Sequence[float], ys: Sequence[float]) -> str:
    # A line of no length with round caps is a dot that stays round however the SVG is stretched.
    return "".join(f"M{_SIZE * x:.1f} {_SIZE * y:.1f}h0" for x, y in zip(xs, ys, strict=True))
