"""Numbers as people read them: the one place where the report and the console choose digits and units."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

Unit: TypeAlias = Literal["", "B", "s", "frac", "1/s", "ratio"]

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def format_value(value: float | None, unit: Unit = "") -> str:
    """Write a number with about three digits in its unit; None and numbers that are not finite are a dash."""
    if value is None or not math.isfinite(value):
        return "\N{EN DASH}"
    if unit == "B":
        return format_bytes(value)
    if unit == "s":
        return format_seconds(value)
    if unit == "ratio":
        return f"{value:.5f}" if 0.5 < value < 2 else format_number(value)
    if unit == "frac":
        return f"{100 * value:.3g} %"
    return f"{format_number(value)}/s" if unit == "1/s" else format_number(value)


def format_number(value: float) -> str:
    """Write a number with about three digits: `0.932`, `12.4`, `1,797`, `1.2e-09`."""
    size = abs(value)
    if value == 0 or (size < 1e6 and float(value).is_integer()):
        return f"{value:,.0f}"
    if size < 1e-3 or size >= 1e6:
        return f"{value:.1e}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.3g}"


def format_bytes(value: float) -> str:
    """Write a size in decimal units: `312 B`, `1.24 kB`, `2.1 GB`."""
    size = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def format_seconds(value: float) -> str:
    """Write a duration: `3.1 ms`, `2.45 s`, `3 min 20 s`, `1 h 5 min`."""
    if value == 0:
        return "0 s"
    if abs(value) < 0.9995:
        return f"{1000 * value:.3g} ms"
    if abs(value) < 99.5:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours else f"{minutes} min {seconds} s"


def format_power(exponent: int) -> str:
    """Write a power of ten for an axis: `10⁻⁹`."""
    return f"10{str(exponent).translate(_SUPERSCRIPT)}"
