"""Run folders as they are found: whole, half written, damaged, or no run at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from latepix.errors import ConfigError
from latepix.report.collect import THUMBNAIL_PX, collect_run, token_writer
from latepix.trace.graph import Trace
from latepix.trace.ingress import ingest_image
from latepix.trace.store import TraceWriter
from tests.unit.report.builders import draw_digit, failed_trace, make_run, make_trace, write_quarantine


def test_full_folder_gives_series_selected_steps_and_quarantine(tmp_path: Path) -> None:
    report = collect_run(make_run(tmp_path / "run", num_steps=12))
    assert report.name == "run"
    assert report.notes == ()
    assert report.series["loss/total"].steps == tuple(range(12))
    assert report.series["eval/reward/mean"].steps[-1] == 12
    assert [(source.kind, source.step) for source in report.sources] == [
        ("train", 0),
        ("train", 6),
        ("train", 11),
        ("eval", 0),
        ("eval", 12),
        ("quarantine", 1),
    ]
    assert {reason.reason: reason.count for reason in report.quarantine} == {
        "inference_failed": 2,
        "too_many_pixels": 1,
    }


def test_selection_keeps_groups_whole_and_within_the_budget(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=3, num_groups=9, group_size=4)
    report = collect_run(run_dir, max_rollouts=45)
    played = [source for source in report.sources if source.kind != "quarantine"]
    assert sum(source.num_shown for source in played) <= 45
    for source in played:
        size = 4 if source.kind == "train" else 1
        assert source.groups
        assert all(len(group.traces) == size for group in source.groups)
    assert played[0].num_rollouts == 36


def test_smallest_budget_shows_one_rollout(tmp_path: Path) -> None:
    report = collect_run(make_run(tmp_path / "run", num_steps=3), max_rollouts=1)
    assert [source.num_shown for source in report.sources if source.kind != "quarantine"] == [1]


def test_evaluation_shows_misses_first(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    rewards = [1.0] * 50
    rewards[17] = 0.0
    _write_traces(run_dir, "eval_000004", [_eval_trace(index, reward) for index, reward in enumerate(rewards)])
    (source,) = collect_run(run_dir, max_rollouts=4).sources
    assert 17 in [group.group_id for group in source.groups]
    assert source.num_shown == 4


def test_cut_off_line_is_skipped_counted_and_named(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=3)
    path = run_dir / "traces" / "step_000002.jsonl"
    path.write_bytes(path.read_bytes()[:-80])
    report = collect_run(run_dir)
    assert "step_000002.jsonl: 1 line was cut off or damaged, and skipped." in report.notes
    last = next(source for source in report.sources if (source.kind, source.step) == ("train", 2))
    assert last.num_rollouts == 11


def test_damaged_line_in_the_middle_costs_only_itself(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=1)
    path = run_dir / "traces" / "step_000000.jsonl"
    lines = path.read_bytes().splitlines()
    lines[3] = b'{"id": "\xff\xfe'
    path.write_bytes(b"\n".join(lines))
    assert collect_run(run_dir).sources[0].num_rollouts == 11


def test_unfinished_run_has_notes_instead_of_a_summary(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=3)
    (run_dir / "summary.json").unlink()
    (run_dir / "config.json").write_text('{"model": {"pa')
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss/tot')
    report = collect_run(run_dir)
    assert report.summary == {}
    assert report.config == {}
    assert report.series["loss/total"].steps == (0, 1, 2)
    assert [note.split()[0] for note in report.notes] == ["config.json", "summary.json"]


def test_row_without_a_step_leaves_the_curves_out(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=1)
    (run_dir / "metrics.jsonl").write_text('{"loss/total": 1}\n')
    report = collect_run(run_dir)
    assert report.series == {}
    assert any("metrics.jsonl" in note for note in report.notes)


def test_missing_and_damaged_pictures_are_marked(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=3)
    first, second, *_ = sorted((run_dir / "images").iterdir())
    first.unlink()
    second.write_bytes(second.read_bytes()[:40])
    report = collect_run(run_dir, max_rollouts=1000)
    assert report.pictures[first.stem] is None
    assert report.pictures[second.stem] is None
    assert "2 pictures are missing from images/, or damaged; their places are marked." in report.notes


def test_picture_hash_cannot_leave_the_images_folder(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=1, num_groups=1)
    outside = tmp_path / "secret.png"
    Image.new("RGB", (8, 8)).save(outside)
    path = run_dir / "traces" / "step_000000.jsonl"
    image = next((run_dir / "images").iterdir())
    text = path.read_text()
    for stored in (run_dir / "images").iterdir():
        text = text.replace(stored.stem, "../../secret")
    path.write_text(text)
    assert image.exists()
    assert collect_run(run_dir).pictures["../../secret"] is None


def test_large_picture_becomes_a_thumbnail(tmp_path: Path) -> None:
    image = ingest_image(Image.effect_noise((1600, 1200), 80).convert("RGB"))
    _write_traces(tmp_path, "step_000000", [make_trace(image=image)])
    url = collect_run(tmp_path).pictures[image.sha256]
    assert url is not None
    assert url.startswith("data:image/jpeg;base64,")
    assert len(url) < image.num_bytes / 4
    assert THUMBNAIL_PX < 1200


@pytest.mark.parametrize("kind", ["missing", "file", "other folder"])
def test_not_a_run_folder_says_what_where_and_what_to_do(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thing"
    if kind == "file":
        path.write_text("")
    elif kind == "other folder":
        path.mkdir()
    with pytest.raises(ConfigError, match=r"thing is not a run folder: it .*Give the `output_dir`"):
        collect_run(path)


def test_quarantine_reasons_come_by_falling_count_with_distinct_examples(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    write_quarantine(tmp_path, [failed_trace("rare", "once", step=9)])
    write_quarantine(tmp_path, [failed_trace("common", "again", step=step) for step in (7, 4, 5)])
    common, rare = collect_run(tmp_path).quarantine
    assert (common.reason, common.count, common.first_step, common.examples) == ("common", 3, 4, ("again",))
    assert rare.reason == "rare"


def test_token_writer_reads_the_models_tokenizer(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "seven": 55}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    write_token = token_writer(str(tmp_path))
    assert write_token is not None
    assert write_token(55) == "seven"
    (tmp_path / "tokenizer.json").write_text("{")
    assert token_writer(str(tmp_path)) is None
    assert token_writer(None) is None


def test_report_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    make_run(tmp_path / "run", num_steps=1)
    program = (
        "import sys; from pathlib import Path; import latepix.report.console\n"
        "from latepix.report.html import write_report; write_report(Path(sys.argv[1]))\n"
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def _write_traces(run_dir: Path, name: str, traces: list[Trace]) -> None:
    TraceWriter(run_dir).write(name, traces)


def _eval_trace(index: int, reward: float) -> Trace:
    return make_trace(image=draw_digit(7), step=4, group_id=index, split="validation", reward=reward)
