from __future__ import annotations

from pathlib import Path

import pytest

from latepix.config.schema import ModelConfig, RunConfig
from latepix.errors import ConfigError
from latepix.metrics import MetricsWriter
from latepix.runs import new_run_folder, write_summary


def test_traces_are_counted_as_such_not_as_samples(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    # Eight rollouts: one failed, two of a group without spread were left out.
    metrics.write(
        0,
        {
            "rollout/traces/count": 8,
            "rollout/failed/count": 1,
            "batch/samples/count": 5,
            "batch/bytes": 500,
            "time/step_s": 2.0,
        },
    )
    metrics.close()
    config = RunConfig(output_dir=tmp_path, model=ModelConfig(path=tmp_path))
    summary = write_summary(config, wall_s=1.0)
    assert (summary["num_traces"], summary["num_quarantined"]) == (8, 1)
    assert (summary["samples_per_s"], summary["wire_bytes_per_sample"]) == (2.5, 100)


def test_two_runs_cannot_use_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with new_run_folder(folder), pytest.raises(ConfigError, match="another run uses"), new_run_folder(folder):
        pass
    with new_run_folder(tmp_path / "run"):
        pass


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    refused = pytest.raises(ConfigError, match=r"already holds a run .*Choose another folder, or remove")
    with refused, new_run_folder(tmp_path):
        pass


def test_a_run_that_was_refused_at_its_start_can_be_tried_again_in_its_folder(tmp_path: Path) -> None:
    for path in ("handshake/trainer.json", "canary/step_000000.npy", "traces/old"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).touch()
    for name in ("metrics.jsonl", "quarantine.jsonl", "summary.json", "report.html"):
        (tmp_path / name).touch()
    with new_run_folder(tmp_path):
        # What the next run would take for its own is gone.
        names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
        assert names == {"metrics.jsonl", "run.lock"}
        assert (tmp_path / "handshake").is_dir()
        assert (tmp_path / "canary").is_dir()
