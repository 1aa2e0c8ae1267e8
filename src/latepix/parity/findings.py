"""What `latepix doctor` found, and how it is shown: a table, a summary, and what to do.

In: one `Row` for each case and the settings that differ. Out: tables on a terminal, Markdown anywhere else, and JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from latepix.inference.facts import Difference
from latepix.parity.compare import Mismatch

Status: TypeAlias = Literal["ok", "refused", "too long", "failed"]

_COLUMNS = ("case", "what it is", "size", "tokens", "grid", "pixels apart", "result")
_ABOUT = _COLUMNS[1]
_SETTING_COLUMNS = ("setting", "server", "trainer", "result")
_COLORS: dict[str, str] = {"ok": "green", "refused": "green", "too long": "yellow", "failed": "bold red"}
_NO_PIXELS = (
    "The server has no /latepix/pixels (HTTP 404), so grids and pixel values could not be compared: install "
    "latepix-vllm beside vLLM (docs/vllm.md)."
)
_SAME_SETTINGS = (
    "Placeholders or grids differ: server and trainer use different image processor settings. Use the same "
    "preprocessor_config.json on both sides, and no --mm-processor-kwargs."
)
_SAME_IDS = (
    "Token ids differ: the server changed the prompt. Serve the model folder, tokenizer included, that is trained."
)
_FIT = (
    "Pixels differ: with images.fit = false the processors of both sides resize, and resize backends differ by up to "
    "0.15. Set images.fit = true; where they still differ, compare image_mean, image_std and rescale_factor."
)
_SAME_DECODER = (
    "Pixels differ although no picture is resized: compare image_mean, image_std and rescale_factor of both sides, and "
    "the versions of Pillow."
)


class Row(msgspec.Struct, frozen=True):
    """What became of one case.

    Attributes:
        name, kind, about: of the case.
        status: `ok`; `refused`, as it must be; `too long` for the context, so not sent; `failed`.
        note: why it was refused, is too long, or failed before anything could be compared.
        sizes: (width, height) of the canonical pictures, one for each slot.
        num_tokens: placeholder tokens of each slot, by the trainer.
        grids: patches (t, h, w) of each slot, by the server; empty if it does not tell.
        max_pixel_difference: largest absolute difference of normalized pixels; None if it was not measured.
        mismatches: what differs.
    """

    name: str
    kind: Literal["picture", "conversation"]
    about: str
    status: Status = "failed"
    note: str = ""
    sizes: list[tuple[int, int]] = []
    num_tokens: list[int] = []
    grids: list[tuple[int, int, int]] = []
    max_pixel_difference: float | None = None
    mismatches: list[Mismatch] = []

    def ends(self, status: Status, note: str = "") -> Row:
        """Return the row with its result."""
        return msgspec.structs.replace(self, status=status, note=note)

    @property
    def reasons(self) -> str:
        """Everything that is said about the result; empty if there is nothing to say."""
        told = [f"{one.what}: server {one.server}, trainer {one.trainer}" for one in self.mismatches]
        return "; ".join([self.note, *told] if self.note else told)


class Findings(msgspec.Struct, frozen=True):
    """Everything that `latepix doctor` found.

    Attributes:
        server: its address.
        model: folder that the trainer reads.
        is_fitted: the config's `images.fit`.
        has_pixels: whether the server shows its pixels.
        max_pixel_difference: what the config allows.
        differences: settings that are not the same on both sides; fatal ones count as failures.
        rows: one for each case.
        wall_s: seconds from the first request to the last answer.
    """

    server: str
    model: str
    is_fitted: bool
    has_pixels: bool
    max_pixel_difference: float
    differences: list[Difference]
    rows: list[Row]
    wall_s: float

    @property
    def num_failed(self) -> int:
        """Settings and cases that do not agree."""
        fatal = sum(difference.is_fatal for difference in self.differences)
        return fatal + sum(row.status == "failed" for row in self.rows)

    @property
    def largest_pixel_difference(self) -> float | None:
        """Largest absolute difference of all cases; None if none was measured."""
        return max(
            (row.max_pixel_difference for row in self.rows if row.max_pixel_difference is not None), default=None
        )

    def to_json(self) -> bytes:
        """Return everything as JSON, with `is_ok` and the largest difference in front."""
        body = {
            "is_ok": self.num_failed == 0,
            "num_failed": self.num_failed,
            "largest_pixel_difference": self.largest_pixel_difference,
            **msgspec.to_builtins(self),
        }
        return msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"

    def to_markdown(self) -> str:
        """Return everything as a page of Markdown."""
        lines = [f"# latepix doctor: {self.model} against {self.server}", ""]
        if self.differences:
            lines += _markdown_table(_SETTING_COLUMNS, map(_setting_cells, self.differences))
        lines += _markdown_table(_COLUMNS, map(_cells, self.rows))
        return "\n".join([*lines, *self._closing_lines()]) + "\n"

    def show(self) -> None:
        """Print everything: tables on a terminal, with the reasons of failures below; Markdown anywhere else."""
        console = Console()
        if not console.is_terminal:
            print(self.to_markdown(), end="")
            return
        if self.differences:
            settings = Table(*_SETTING_COLUMNS, box=SIMPLE_HEAD)
            for one in self.differences:
                color = "bold red" if one.is_fatal else "dim"
                settings.add_row(*(Text(cell, style=color) for cell in _setting_cells(one)))
            console.print(settings)
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in _COLUMNS:
            if column != _ABOUT:
                table.add_column(column, no_wrap=column == "case")
        for row in self.rows:
            name, _, *cells, _ = _cells(row)
            table.add_row(name, *cells, Text(row.status, style=_COLORS[row.status]))
        console.print(table)
        for row in self.rows:
            if row.status in ("failed", "too long"):
                console.print(Text(f"{row.name} ({row.about}): ", style=_COLORS[row.status]).append(row.reasons))
        for line in self._closing_lines():
            console.print(Text(line))

    def _closing_lines(self) -> list[str]:
        """Return the remedies and, last, the summary."""
        kinds = {mismatch.kind for row in self.rows for mismatch in row.mismatches}
        remedies = [
            *([] if self.has_pixels else [_NO_PIXELS]),
            *([_SAME_SETTINGS] if kinds & {"places", "grid"} else []),
            *([_SAME_IDS] if "ids" in kinds and "places" not in kinds else []),
            *([_SAME_DECODER if self.is_fitted else _FIT] if "pixels" in kinds else []),
        ]
        count = {status: sum(row.status == status for row in self.rows) for status in _COLORS}
        fatal = sum(difference.is_fatal for difference in self.differences)
        parts = [
            f"{count['ok']} of {len(self.rows)} cases agree",
            f"{count['refused']} are rightly refused",
            *([f"{count['too long']} do not fit into inference.max_model_len"] if count["too long"] else []),
            *([f"{count['failed']} FAILED"] if count["failed"] else []),
            *([f"{fatal} of the settings DIFFER"] if fatal else []),
        ]
        largest = self.largest_pixel_difference
        pixels = (
            "not measured"
            if largest is None
            else f"at most {largest:.2g} apart (allowed: {self.max_pixel_difference:.2g})"
        )
        return [*remedies, f"{', '.join(parts)}; pixels {pixels}; {self.wall_s:.1f} s."]


def _setting_cells(difference: Difference) -> list[str]:
    result = "FAILED" if difference.is_fatal else "noted"
    return [difference.setting, difference.server, difference.trainer, f"{result}. {difference.remedy}".rstrip(". ")]


def _cells(row: Row) -> list[str]:
    status = "FAILED" if row.status == "failed" else row.status
    difference = row.max_pixel_difference
    return [
        row.name,
        row.about,
        ", ".join(f"{width}x{height}" for width, height in row.sizes) or "-",
        " + ".join(map(str, row.num_tokens)) or "-",
        ", ".join(f"{t}x{h}x{w}" for t, h, w in row.grids) or "-",
        "-" if difference is None else f"{difference:.2g}",
        f"{status}: {row.reasons}" if row.reasons else status,
    ]


def _markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for cells in rows:
        # A server's message may hold anything, and the special tokens have bars in them.
        shown = [" ".join(cell.split()).replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(shown)} |")
    return [*lines, ""]
