"""What a parity run found, as JSON and as Markdown.

In: the steps, the tables and the settings of a run. Out: `parity.json` with the numbers as they are, and `parity.md`
with the digits that people read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from latepix.inference.facts import Difference
from latepix.parity.measure import Agreement, Category, StepAgreement, Tables, WorstToken

_DASH = "\N{EN DASH}"
_AGREEMENT_TITLES = ("mean KL", "max KL", "mean abs diff", "tokens")


class ParityReport(msgspec.Struct, frozen=True):
    """Everything that is known at the end; `parity.json` has these keys. Numbers that are not finite are null there.

    Attributes:
        passed: whether every step's mean mismatch KL is below the threshold.
        threshold: `parity.max_kl`, nats.
        verdict: the same in words, with what to look at.
        num_updates_shown: steps in which the server clearly serves the newest version, and not the one before.
        settings: what was compared, by name.
        differences: of the handshake, all harmless.
        steps: in order.
        tables: the tokens of all steps.
    """

    passed: bool
    threshold: float
    verdict: str
    num_updates_shown: int
    settings: dict[str, str]
    differences: tuple[Difference, ...]
    steps: tuple[StepAgreement, ...]
    tables: Tables


def to_json(report: ParityReport) -> bytes:
    """Return the report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report)) + b"\n"


def to_markdown(report: ParityReport) -> str:
    """Return the report as Markdown, with a line break at its end."""
    parts = [
        f"# Parity: {'passed' if report.passed else 'FAILED'}",
        report.verdict,
        "\n".join(f"* {name}: {_line(value)}" for name, value in report.settings.items()),
        "## Steps",
        "Measured before the step was taken, on the rollouts just sampled; nats. *Version before* is the mean KL of "
        "the same tokens against the trainer's weights one version before.",
        _steps_table(report.steps),
    ]
    if report.steps:
        parts += [_updates(report), f"Largest difference: {_worst(max(report.steps, key=_worst_kl))}"]
    parts += ["## By pictures before the token", _categories_table("pictures", report.tables.by_images)]
    parts += ["## By tokens since the nearest picture", _categories_table("distance", report.tables.by_distance)]
    parts += ["## By turn", _categories_table("turn", report.tables.by_turn)]
    if report.differences:
        rows = [(_cell(one.setting), _cell(one.server), _cell(one.trainer)) for one in report.differences]
        parts += ["## Settings that differ, all harmless", _table(("setting", "server", "trainer"), rows, align="lll")]
    return "\n\n".join(parts) + "\n"


def _steps_table(steps: Sequence[StepAgreement]) -> str:
    titles = ("step", *_AGREEMENT_TITLES, "rollouts", "failed", "pictures", "reward", "entropy", "version before")
    rows = [
        (
            str(one.step),
            *_agreement_cells(one.agreement),
            f"{one.num_rollouts:,}",
            f"{one.num_failed:,}",
            f"{one.num_pictures:,}",
            f"{one.reward_mean:.2f}",
            f"{one.entropy_mean:.2f}",
            _small(one.mismatch_kl_mean_before),
        )
        for one in steps
    ]
    return _table(titles, rows, align="r" * len(titles))


def _categories_table(title: str, categories: Sequence[Category]) -> str:
    rows = [(one.name, *_agreement_cells(one.agreement)) for one in categories]
    return _table((title, *_AGREEMENT_TITLES), rows, align="lrrrr")


def _agreement_cells(agreement: Agreement) -> tuple[str, ...]:
    numbers = (agreement.mismatch_kl_mean, agreement.mismatch_kl_max, agreement.abs_log_ratio_mean)
    return (*map(_small, numbers), f"{agreement.num_tokens:,}" if agreement.num_tokens else _DASH)


def _small(value: float | None) -> str:
    """Write a difference: `3.4e-14`, `0`; a dash where nothing was measured, and NaN as it is."""
    if value is None:
        return _DASH
    return "0" if value == 0 else f"{value:.1e}"


def _updates(report: ParityReport) -> str:
    return (
        f"Weight updates: after {report.num_updates_shown} of {len(report.steps) - 1} the server clearly serves the "
        "new version (its mean KL is below half of that of the version before)."
    )


def _worst_kl(step: StepAgreement) -> float:
    return math.inf if math.isnan(step.worst.mismatch_kl) else step.worst.mismatch_kl


def _worst(step: StepAgreement) -> str:
    token: WorstToken = step.worst
    where = f"{token.num_images} before it, the nearest {token.image_distance} tokens" if token.num_images else "none"
    return (
        f"step {step.step}, sample {token.sample}, token {token.position} (turn {token.turn}, pictures: {where}): "
        f"server {token.inference_logprob:.6f}, trainer {token.trainer_logprob:.6f}, KL "
        f"{_small(token.mismatch_kl)}."
    )


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, align: str) -> str:
    """Lay out a Markdown table with columns of even width; `align` has `l` or `r` for each."""
    lines = [tuple(titles), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    rules = tuple(
        "-" * width if side == "l" else "-" * (width - 1) + ":" for side, width in zip(align, widths, strict=True)
    )
    return "\n".join(
        "| "
        + " | ".join(
            cell.ljust(width) if side == "l" else cell.rjust(width)
            for cell, side, width in zip(line, align, widths, strict=True)
        )
        + " |"
        for line in (lines[0], rules, *lines[1:])
    )


def _cell(text: str) -> str:
    """Make text safe inside a table."""
    return _line(text).replace("|", "\\|")


def _line(text: str) -> str:
    return " ".join(text.split())
