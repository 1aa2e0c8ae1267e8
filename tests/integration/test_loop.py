"""Whole runs through the command line: the tiny model, real digits, three processes, HTTP, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from latepix.metrics import read_metrics
from latepix.trace.store import read_traces
from tests.integration.cli import EXAMPLE, latepix

pytestmark = pytest.mark.slow

STEPS = 60
NUM_TASKS = 240
SUMMARY_KEYS = {
    "steps",
    "reward_first",
    "reward_last",
    "eval_before",
    "eval_after",
    "mismatch_kl_mean",
    "mismatch_kl_max",
    "num_traces",
    "num_quarantined",
    "wall_s",
    "samples_per_s",
    "wire_bytes_per_sample",
}


@pytest.fixture(scope="module")
def warm_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model after the demo's warm start."""
    out = tmp_path_factory.mktemp("sft") / "run"
    latepix("sft", "@", EXAMPLE / "sft.toml", "--model.path", tiny_model, "--output_dir", out)
    return out / "model"


def rl(model: Path, out: Path, *settings: object) -> Path:
    """Run the demo's RL for fewer steps, with evaluations before and after only."""
    latepix(
        *("rl", "@", EXAMPLE / "run.toml", "--model.path", model, "--output_dir", out, "--steps", STEPS),
        *("--eval.every_steps", 0, "--eval.num_tasks", NUM_TASKS, *settings),
    )
    return out


@pytest.fixture(scope="module")
def run(warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rl(warm_model, tmp_path_factory.mktemp("rl") / "run")


@pytest.fixture(scope="module")
def blind_run(warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rl(warm_model, tmp_path_factory.mktemp("rl") / "blind", "--environment.blank_pictures", "true")


@pytest.fixture(scope="module")
def flawed_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a short run in which a tenth of the rollouts fails and sampling overlaps training."""
    out = tmp_path_factory.mktemp("rl") / "flawed"
    latepix(
        *("rl", "--model.path", tiny_model, "--output_dir", out, "--steps", 5, "--sampling.max_tokens", 2),
        *("--environment.type", "tests.tiny.environments:SometimesRaises", "--eval.num_tasks", 4),
        *("--orchestrator.prompts_per_step", 10, "--orchestrator.group_size", 4),
        # An untrained model earns nothing: the entropy bonus is what moves its weights.
        *("--orchestrator.max_off_policy_steps", 1, "--trainer.optim.lr", 1e-3, "--trainer.loss.entropy_bonus", 0.1),
    )
    return out


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def late_reward(run: Path) -> float:
    rewards = [
        row["rollout/reward/mean"] for row in read_metrics(run / "metrics.jsonl") if "rollout/reward/mean" in row
    ]
    return sum(rewards[-10:]) / 10


def test_reward_rises(run: Path) -> None:
    summary = summary_of(run)
    assert late_reward(run) > summary["reward_first"] + 0.2
    assert summary["eval_after"] > summary["eval_before"] + 0.1
    # Chance is 0.1; longer runs of this recipe go beyond 0.9.
    assert summary["eval_after"] > 0.7


def test_without_pictures_nothing_is_learned(run: Path, blind_run: Path) -> None:
    assert summary_of(blind_run)["eval_after"] < 0.2
    assert late_reward(blind_run) < 0.2
    assert summary_of(run)["eval_after"] - summary_of(blind_run)["eval_after"] > 0.5


def test_server_and_trainer_agree_on_every_step(run: Path) -> None:
    rows = read_metrics(run / "metrics.jsonl")
    divergences = [row["loss/mismatch_kl/mean"] for row in rows if "loss/mismatch_kl/mean" in row]
    assert len(divergences) == STEPS
    # Float32 on both sides and the same arithmetic: observed 1e-13.
    assert max(divergences) < 1e-5
    assert {row["policy/off_policy_steps"] for row in rows if "policy/version" in row} == {0}


def test_the_summary_says_what_happened(run: Path) -> None:
    summary = summary_of(run)
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["steps"] == STEPS
    assert summary["num_traces"] == STEPS * 24 * 8
    assert summary["num_quarantined"] == 0
    assert summary["mismatch_kl_max"] < 1e-5
    # A micro batch carries references and encoded pictures, never pixels: 4 patches alone would be 24,576 bytes.
    assert summary["wire_bytes_per_sample"] < 2000
    assert all(0 < num_bytes < 2.5e9 for num_bytes in summary["peak_rss_bytes"].values())


def test_the_run_folder_is_complete(run: Path) -> None:
    assert json.loads((run / "config.json").read_text())["steps"] == STEPS
    assert "<html" in (run / "report.html").read_text()
    assert {log.name for log in (run / "logs").iterdir()} == {"inference.log", "orchestrator.log", "trainer.log"}
    assert list((run / "batches").iterdir()) == []
    assert not list(run.rglob("*.tmp"))
    traces = list(read_traces(run / "traces" / "step_000000.jsonl"))
    assert len(traces) == 24 * 8
    assert all(trace.failure is None and trace.num_sampled_tokens for trace in traces)


def test_the_final_model_loads_and_has_moved(run: Path, warm_model: Path) -> None:
    before, after = (AutoModelForImageTextToText.from_pretrained(folder) for folder in (warm_model, run / "model"))
    assert sorted(file.name for file in warm_model.iterdir()) == sorted(file.name for file in (run / "model").iterdir())
    for name, tensor in after.state_dict().items():
        assert torch.isfinite(tensor).all()
        assert not torch.equal(tensor, before.state_dict()[name]), name


def test_eval_gives_the_reward_of_the_runs_last_evaluation(run: Path, tmp_path: Path) -> None:
    out = latepix(
        *("eval", "@", EXAMPLE / "run.toml", "--model.path", run / "model", "--output_dir", tmp_path),
        *("--eval.split", "test", "--eval.num_tasks", NUM_TASKS),
    )
    printed = json.loads(out.splitlines()[-1])
    assert printed == json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert printed["num_tasks"] == NUM_TASKS
    assert printed["reward"] == summary_of(run)["eval_after"]


def test_a_run_that_overlaps_samples_from_weights_one_step_old(flawed_run: Path) -> None:
    rows = [row for row in read_metrics(flawed_run / "metrics.jsonl") if "policy/off_policy_steps" in row]
    fresh, *later = rows
    stale = [row for row in later if row["policy/off_policy_steps"] == 1]
    # A trainer that is quicker than a descheduled orchestrator may catch up now and then, never fall further behind.
    assert fresh["policy/off_policy_steps"] == 0
    assert {row["policy/off_policy_steps"] for row in later} <= {0, 1}
    assert stale
    assert summary_of(flawed_run)["steps"] == len(rows) == 5
    # Other weights than those that sampled: now the mismatch is real.
    assert fresh["loss/mismatch_kl/mean"] < 1e-9 < max(row["loss/mismatch_kl/mean"] for row in stale)


def test_rollouts_that_fail_are_set_aside_and_the_run_goes_on(flawed_run: Path) -> None:
    quarantine = [json.loads(line) for line in (flawed_run / "quarantine.jsonl").read_text().splitlines()]
    assert len(quarantine) == summary_of(flawed_run)["num_quarantined"] == 5 * 40 // 10
    assert {entry["failure"]["reason"] for entry in quarantine} == {"environment_raised"}
    assert all("ZeroDivisionError: the tenth rollout" in entry["failure"]["message"] for entry in quarantine)
    rows = [row for row in read_metrics(flawed_run / "metrics.jsonl") if "batch/samples/count" in row]
    assert [row["batch/samples/count"] for row in rows] == [36] * 5
    assert [row["rollout/failed/environment_raised/count"] for row in rows] == [4] * 5
