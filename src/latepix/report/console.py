"""Progress in the terminal while a command runs: a live table, or one plain line per step when piped.

In: the joined rows of `metrics.read_metrics`, as often as the caller likes. Out: text on standard output. Which
numbers are shown is a list of `Column`s, so that one class serves `rl` and `sft`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from latepix.report.numbers import format_bytes, format_number, format_seconds


class Column(msgspec.Struct, frozen=True):
    """One number of a step.

    Attributes:
        title: heading in the table.
        key: of the metric.
        plain: the words around the number in a plain line, `{}` stands for the number.
        write: number to text.
        carry: show the latest known value where a step has none (held-out reward is measured every N steps).
        hide_zero: leave zeros out.
        parts: key of a count that the number is a sum of, `{}` for the part's name: shown behind it, largest first.
    """

    title: str
    key: str
    plain: str
    write: Callable[[float], str] = format_number
    carry: bool = False
    hide_zero: bool = False
    parts: str = ""


def _two_digits(value: float) -> str:
    return f"{value:.2f}"


def _short(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 10 else format_number(value)


def _scientific(value: float) -> str:
    return f"{value:.1e}"


#: What `latepix rl` shows.
RL_COLUMNS = (
    Column("reward", "rollout/reward/mean", "reward {}", _two_digits),
    Column("held-out", "eval/reward/mean", "held-out {}", _two_digits, carry=True),
    Column("mismatch KL", "loss/mismatch_kl/mean", "mismatch_kl {}", _scientific),
    Column("entropy", "loss/entropy/mean", "entropy {}", _short),
    Column("samples/s", "perf/samples_per_s", "{} samples/s"),
    Column("per sample", "batch/bytes_per_sample", "{}/sample", format_bytes),
    Column("failed", "rollout/failed/count", "{} failed", hide_zero=True, parts="rollout/failed/{}/count"),
)
#: What `latepix sft` shows.
SFT_COLUMNS = (
    Column("loss", "loss/total", "loss {}"),
    Column("lr", "optim/lr", "lr {}", _scientific),
    Column("grad norm", "optim/grad_norm", "grad_norm {}"),
    Column("tokens/s", "perf/tokens_per_s", "{} tokens/s"),
)


class RunConsole:
    """Shows a run's progress; a context manager.

    On a terminal: a progress bar with the time left, a table of the latest steps and a line that says what is being
    waited for. Anywhere else: one line per finished step and nothing more.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        *,
        columns: Sequence[Column] = RL_COLUMNS,
        done_steps: int = 0,
        done_key: str = "loss/total",
        num_rows: int = 8,
        file: TextIO | None = None,
    ) -> None:
        """Prepare the display; nothing is shown before `with`.

        Args:
            title: one line above the progress bar.
            total_steps: steps of the whole run.
            columns: what is shown of a step.
            done_steps: steps finished before this start (resume); they are not printed again.
            done_key: a step is finished once its row has this metric.
            num_rows: latest steps in the table.
            file: where to write; None is standard output.
        """
        self._console = Console(file=file)
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._title = title
        self._total_steps = total_steps
        self._columns = tuple(columns)
        self._done_key = done_key
        self._num_rows = num_rows
        self._num_done = done_steps
        self._rows: list[dict[str, float]] = []
        self._spinner: Spinner | None = None
        self._live: Live | None = None
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None, complete_style="blue", finished_style="green"),
            TimeElapsedColumn(),
            TextColumn("[dim]left"),
            TimeRemainingColumn(),
            console=self._console,
            expand=True,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=done_steps)

    @property
    def is_live(self) -> bool:
        """Whether something is drawn; if not, there are plain lines only."""
        return self._is_live

    def __enter__(self) -> RunConsole:
        """Start drawing."""
        if self._is_live:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Draw the last state and give the terminal back."""
        self._spinner = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, step_rows: Sequence[Mapping[str, Any]]) -> None:
        """Show the rows of all steps so far, in order; each finished step is printed once."""
        known: dict[str, float] = {}
        rows = []
        for row in step_rows:
            known.update({c.key: row[c.key] for c in self._columns if c.carry and row.get(c.key) is not None})
            if int(row["step"]) >= self._total_steps:
                continue
            rows.append({**row, **{key: value for key, value in known.items() if row.get(key) is None}})
        for row in rows:
            if row["step"] >= self._num_done and self._done_key in row:
                self._num_done = int(row["step"]) + 1
                if not self._is_live:
                    self._print_line(row)
        self._rows = rows[-self._num_rows :]
        self._progress.update(self._task, completed=self._num_done)

    def status(self, text: str | None) -> None:
        """Say what is being waited for; None or an empty text takes the line away. Shown on a terminal only."""
        self._spinner = Spinner("dots", text=Text(text, style="dim"), style="blue") if text else None

    def _print_line(self, row: Mapping[str, Any]) -> None:
        parts = [f"step {int(row['step']) + 1}/{self._total_steps}"]
        parts += [c.plain.format(text) + _parts(c, row) for c in self._columns if (text := _cell(c, row))]
        print("  ".join(parts), file=self._console.file, flush=True)

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [Text(self._title, style="bold"), self._progress]
        if self._rows:
            table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
            table.add_column("step", justify="right")
            for column in self._columns:
                table.add_column(column.title, justify="right")
            for row in self._rows:
                style = "" if self._done_key in row else "dim"
                cells = [_cell(column, row) + _parts(column, row) or "·" for column in self._columns]
                table.add_row(str(int(row["step"]) + 1), *cells, style=style)
            parts.append(table)
        if self._spinner is not None:
            parts.append(self._spinner)
        return Group(*parts)


def print_summary(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the few numbers a run comes down to; numbers that `summary` lacks are left out.

    Args:
        summary: what `summary.json` holds.
        console: where to print; None is standard output.
    """
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for label, text in summary_lines(summary):
        table.add_row(label, Text(text, style="bold" if label == "held-out reward" else ""))
    (console or Console()).print(table)


def summary_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (label, text) of the numbers that a run comes down to."""

    def write(key: str, how: Callable[[float], str]) -> str:
        value = summary.get(key)
        if isinstance(value, Mapping):
            value = sum(value.values())
        return how(value) if isinstance(value, int | float) else ""

    def pair(first: str, second: str, between: str, how: Callable[[float], str]) -> str:
        return between.join(text for text in (write(first, how), write(second, how)) if text)

    def three_digits(value: float) -> str:
        return f"{value:.3f}"

    lines = [
        ("held-out reward", pair("eval_before", "eval_after", " -> ", three_digits)),
        ("training reward", pair("reward_first", "reward_last", " -> ", three_digits)),
        ("mismatch KL, mean / max", pair("mismatch_kl_mean", "mismatch_kl_max", " / ", _scientific)),
        ("steps", write("steps", format_number)),
        ("wall time", write("wall_s", format_seconds)),
        ("samples per second", write("samples_per_s", format_number)),
        ("on the wire, per sample", write("wire_bytes_per_sample", format_bytes)),
        ("peak memory", write("peak_rss_bytes", format_bytes)),
        ("rollouts", write("num_traces", format_number)),
        ("quarantined", write("num_quarantined", format_number)),
    ]
    return [(label, text) for label, text in lines if text]


def print_error(message: object) -> None:
    """Print `latepix: error: ...` on standard error."""
    print(f"latepix: error: {message}", file=sys.stderr, flush=True)


def _cell(column: Column, row: Mapping[str, Any]) -> str:
    value = row.get(column.key)
    if not isinstance(value, int | float) or (column.hide_zero and value == 0):
        return ""
    return column.write(value)


def _parts(column: Column, row: Mapping[str, Any]) -> str:
    """Return ` (environment_raised 2, truncated 1)`, or nothing."""
    if not column.parts:
        return ""
    before, _, after = column.parts.partition("{}")
    counts = {
        key.removeprefix(before).removesuffix(after): value
        for key, value in row.items()
        if key.startswith(before) and key.endswith(after) and len(key) > len(before) + len(after) and value
    }
    named = sorted(counts.items(), key=lambda part: (-part[1], part[0]))
    return f" ({', '.join(f'{name} {column.write(value)}' for name, value in named)})" if named else ""
