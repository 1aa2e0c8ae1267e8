"""A run sets rollouts aside; `latepix replay` brings their errors back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from latepix.trace.store import read_traces
from tests.integration.cli import finish, latepix, start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a short run in which every tenth task fails."""
    out = tmp_path_factory.mktemp("rl") / "run"
    shown = latepix(
        *("rl", "--model.path", tiny_model, "--output_dir", out, "--steps", 2, "--sampling.max_tokens", 2),
        *("--environment.type", "tests.tiny.environments:FailsOnSomeTasks", "--eval.num_tasks", 20),
        *("--orchestrator.prompts_per_step", 10, "--orchestrator.group_size", 2),
        *("--orchestrator.max_failed_frac", 0.9),
    )
    lines = shown.splitlines()
    assert [line.split(": ")[1] for line in lines if line.startswith("budget: ")] == ["pictures", "tokens", "bytes"]
    assert any(" failed (environment_raised " in line for line in lines if line.startswith("step "))
    first_step = next(number for number, line in enumerate(lines) if line.startswith("step 1/2  "))
    assert all(not line.startswith("budget: ") for line in lines[first_step:])
    return out


def test_a_quarantined_rollout_fails_again_with_a_traceback(run: Path) -> None:
    traces = list(read_traces(run / "quarantine.jsonl"))
    trace = next(trace for trace in traces if trace.split == "train")
    code, out, err = finish(start("replay", run, "--id", trace.id))
    assert code == 0, err
    assert f"model: {run / 'model'} (the run's final weights)" in out
    assert f"rollout {trace.id}: task {trace.task_index} of split train ({trace.task_id}), seed {trace.seed}, " in out
    assert "now: environment_raised (the same reason)\nTraceback (most recent call last):" in out
    assert f"KeyError: '{trace.task_id}'" in out
    assert out.count(f"rollout {trace.id}") == 1
    assert out.endswith("replayed 1: 1 failed again for the same reason, 0 for another one, 0 succeeded\n")


def test_a_rollout_that_succeeds_now_gives_exit_status_1(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    fixed = config | {"environment": config["environment"] | {"type": "digits"}}
    (run / "config.json").write_text(json.dumps(fixed))
    try:
        code, out, _ = finish(start("replay", run, "--limit", 2, "--model", config["model"]["path"]))
    finally:
        (run / "config.json").write_text(json.dumps(config))
    assert code == 1
    assert "(--model)" in out
    assert out.count("now: succeeded this time, reward ") == 2
    assert out.endswith("replayed 2: 0 failed again for the same reason, 0 for another one, 2 succeeded\n")
