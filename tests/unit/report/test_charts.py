"""Curves: axes that fit, paths that stay inside, values that are told the truth about."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from latepix.report.charts import CHARTS, ChartSpec, LineSpec, draw_chart, moving_mean, thin
from latepix.report.collect import Series
from latepix.report.numbers import format_number, format_value

FINITE = st.floats(min_value=-1e12, max_value=1e12, allow_nan=False)


def _series(*values: float) -> Series:
    return Series(steps=tuple(range(len(values))), values=values)


def _spec(**changes: object) -> ChartSpec:
    return ChartSpec(**{"title": "t", "hint": "h", "lines": (LineSpec("a", "a"),), **changes})  # type: ignore


def test_chart_without_data_is_left_out() -> None:
    assert draw_chart(CHARTS[0], {"other": _series(1.0)}) is None


def test_log_axis_shows_the_threshold_only_in_view() -> None:
    spec = next(spec for spec in CHARTS if spec.scale == "log")
    low = draw_chart(spec, {"loss/mismatch_kl/mean": _series(1e-9, 2e-8)})
    high = draw_chart(spec, {"loss/mismatch_kl/mean": _series(1e-4, 0.02)})
    assert low is not None
    assert high is not None
    assert low.references == ()
    assert [tick.label for tick in low.y_ticks] == ["10⁻⁹", "10⁻⁸", "10⁻⁷"]
    assert [mark.label for mark in high.references] == ["threshold 0.015"]


def test_log_axis_puts_exact_agreement_on_the_floor() -> None:
    chart = draw_chart(_spec(scale="log"), {"a": _series(0.0, 1e-6, 1e-5)})
    assert chart is not None
    assert chart.hover["curves"][0]["y"] == [100.0, 100.0, 0.0]


def test_log_chart_of_zeros_only_falls_back_to_a_plain_axis() -> None:
    chart = draw_chart(_spec(scale="log"), {"a": _series(0.0, 0.0)})
    assert chart is not None
    assert chart.y_ticks[0].label == "0"


def test_stages_lie_on_each_other() -> None:
    spec = _spec(scale="stacked", lines=(LineSpec("a", "a"), LineSpec("b", "b")))
    chart = draw_chart(spec, {"a": _series(1.0, 1.0), "b": _series(3.0, 1.0)})
    assert chart is not None
    upper, lower = chart.hover["curves"]
    assert (upper["label"], upper["y"], upper["text"]) == ("b", [0.0, 50.0], ["3", "1"])
    assert lower["y"] == [75.0, 75.0]


def test_held_out_reward_is_points_on_the_training_chart() -> None:
    chart = draw_chart(CHARTS[0], {"rollout/reward/mean": _series(*[0.5] * 30), "eval/reward/mean": _series(0.4, 0.6)})
    assert chart is not None
    assert [curve.style for curve in chart.curves] == ["faint", "line", "faint", "points"]
    assert [tick.label for tick in chart.y_ticks] == ["0", "0.25", "0.50", "0.75", "1.00"]
    assert chart.curves[3].path.count("h0") == 2


@pytest.mark.parametrize("scale", ["linear", "zero", "unit", "log", "stacked"])
@given(values=st.lists(FINITE, min_size=1, max_size=30))
@example(values=[5e-324])
@example(values=[0.0, -5e-324])
def test_curves_stay_inside_the_plot(scale: str, values: list[float]) -> None:
    chart = draw_chart(_spec(scale=scale), {"a": _series(*values)})
    assert chart is not None
    numbers = [float(text) for curve in chart.curves for text in re.findall(r"[ML](\S+) ([^\sLMhZ]+)", curve.path)[0]]
    assert all(0 <= number <= 1000 for number in numbers)
    assert all(0 <= tick.at <= 100 for tick in (*chart.x_ticks, *chart.y_ticks))
    assert 2 <= len(chart.y_ticks) <= 7


def test_long_series_is_thinned_and_keeps_its_mean() -> None:
    data = thin(_series(*range(10_000)), max_points=600)
    assert len(data.steps) <= 600
    assert sum(data.values) / len(data.values) == pytest.approx(4999.5, rel=0.01)


def test_moving_mean_of_a_constant_is_constant() -> None:
    assert moving_mean([2.0] * 7, 5) == [2.0] * 7
    assert moving_mean([0.0, 3.0, 0.0], 3) == [1.5, 1.0, 1.5]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "", "0"),
        (0.9321, "", "0.932"),
        (1797, "", "1,797"),
        (1.234e-9, "", "1.2e-09"),
        (None, "", "\N{EN DASH}"),
        (float("nan"), "", "\N{EN DASH}"),
        (312.4, "B", "312 B"),
        (999.9, "B", "1 kB"),
        (1.834e9, "B", "1.83 GB"),
        (0.0312, "s", "31.2 ms"),
        (187.3, "s", "3 min 7 s"),
        (3900, "s", "1 h 5 min"),
        (0.25, "frac", "25 %"),
        (211.4, "1/s", "211/s"),
        (1.00002, "ratio", "1.00002"),
    ],
)
def test_numbers_are_written_with_their_unit(value: float | None, unit: str, text: str) -> None:
    assert format_value(value, unit) == text  # type: ignore


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_can_be_written(value: float) -> None:
    assert 0 < len(format_number(value)) < 12
