"""The console: plain lines when piped, a table on a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from latepix.report.console import SFT_COLUMNS, RunConsole, print_error, print_summary
from tests.unit.report.builders import make_summary


def _row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "rollout/reward/mean": 0.71,
        "rollout/failed/count": 0,
        "loss/total": -0.01,
        "loss/mismatch_kl/mean": 1.2e-9,
        "loss/entropy/mean": 0.9,
        "perf/samples_per_s": 210.3,
        "batch/bytes_per_sample": 312.4,
        **more,
    }


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_piped_output_is_one_line_per_finished_step() -> None:
    out = io.StringIO()
    with RunConsole("digits", 160, file=out) as console:
        console.status("waiting for the inference server")
        console.update([_row(11, **{"eval/reward/mean": 0.68})])
    assert out.getvalue() == (
        "step 12/160  reward 0.71  held-out 0.68  mismatch_kl 1.2e-09  entropy 0.9  210 samples/s  312 B/sample\n"
    )


def test_each_step_is_printed_once_and_only_when_trained() -> None:
    out = io.StringIO()
    unfinished = {"step": 1, "rollout/reward/mean": 0.8}
    with RunConsole("digits", 3, file=out) as console:
        console.update([_row(0), unfinished])
        console.update([_row(0), unfinished])
        console.update([_row(0), _row(1), _row(2), {"step": 3, "eval/reward/mean": 0.9}])
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["step 1/3", "step 2/3", "step 3/3"]


def test_latest_held_out_reward_is_carried_on_and_failures_are_named() -> None:
    out = io.StringIO()
    with RunConsole("digits", 3, file=out) as console:
        console.update([_row(0, **{"eval/reward/mean": 0.5}), _row(1, **{"rollout/failed/count": 2})])
    second = out.getvalue().splitlines()[1]
    assert "held-out 0.50" in second
    assert second.endswith("  2 failed")


def test_failures_are_counted_by_reason_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {
        "rollout/failed/count": 3,
        "rollout/failed/truncated/count": 1,
        "rollout/failed/environment_raised/count": 2,
    }
    out = io.StringIO()
    with RunConsole("digits", 3, file=out) as console:
        console.update([_row(0, **failed)])
    assert out.getvalue().endswith("  3 failed (environment_raised 2, truncated 1)\n")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    out = _Terminal()
    with RunConsole("digits", 3, file=out) as console:
        console.update([_row(0, **failed)])
    assert "3 (environment_raised 2, truncated 1)" in out.getvalue()


def test_resumed_run_does_not_repeat_its_steps() -> None:
    out = io.StringIO()
    with RunConsole("digits", 4, done_steps=2, file=out) as console:
        console.update([_row(0), _row(1), _row(2)])
    assert out.getvalue().startswith("step 3/4")


def test_missing_and_null_metrics_are_left_out() -> None:
    out = io.StringIO()
    with RunConsole("digits", 4, file=out) as console:
        console.update([{"step": 0, "loss/total": None, "rollout/reward/mean": None}])
    assert out.getvalue() == "step 1/4\n"


def test_sft_columns() -> None:
    out = io.StringIO()
    row = {"step": 0, "loss/total": 2.314, "optim/lr": 1e-3, "perf/tokens_per_s": 12345.0}
    with RunConsole("warm start", 30, columns=SFT_COLUMNS, file=out) as console:
        console.update([row])
    assert out.getvalue() == "step 1/30  loss 2.31  lr 1.0e-03  12,345 tokens/s\n"


def test_terminal_shows_title_progress_table_and_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "110")
    out = _Terminal()
    with RunConsole("digits [seed 0]", 160, file=out) as console:
        console.status("waiting for weights [v12]")
        console.update([_row(11, **{"eval/reward/mean": 0.68}), {"step": 12, "rollout/reward/mean": 0.7}])
    text = out.getvalue()
    for expected in ("digits [seed 0]", "12/160", "held-out", "0.68", "1.2e-09", "312 B"):
        assert expected in text, expected


def test_terminal_keeps_its_last_frame_when_the_run_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    out = _Terminal()
    console = RunConsole("digits", 2, file=out)
    with pytest.raises(KeyboardInterrupt), console:
        raise KeyboardInterrupt
    assert "\x1b[?25h" in out.getvalue()


def test_summary_prints_what_there_is() -> None:
    out = io.StringIO()
    print_summary(make_summary(160), Console(file=out, width=80))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "held-out reward 0.548 -> 0.944" in lines
    assert "mismatch KL, mean / max 1.2e-09 / 4.5e-07" in lines
    assert "wall time 3 min 7 s" in lines
    out = io.StringIO()
    print_summary({"steps": 3, "eval_before": None}, Console(file=out, width=80))
    assert out.getvalue().split() == ["steps", "3"]


def test_error_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("port [8000] is in use")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "latepix: error: port [8000] is in use\n")
