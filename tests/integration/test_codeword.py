"""Several turns and several pictures through the command line: warm start and a few RL steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from latepix.metrics import read_metrics
from latepix.trace.store import read_traces
from tests.integration.cli import ROOT, latepix

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "codeword"
STEPS = 3


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a short run of the example, from a short warm start."""
    out = tmp_path_factory.mktemp("codeword")
    latepix(
        *("sft", "@", EXAMPLE / "sft.toml", "--model.path", tiny_model, "--output_dir", out / "sft"),
        *("--steps", 20, "--batch_size", 16),
    )
    latepix(
        *("rl", "@", EXAMPLE / "run.toml", "--model.path", out / "sft" / "model", "--output_dir", out / "rl"),
        *("--steps", STEPS, "--trainer.optim.warmup_steps", 0, "--eval.num_tasks", 8),
        *("--orchestrator.prompts_per_step", 8, "--orchestrator.group_size", 4),
    )
    return out / "rl"


def test_no_rollout_fails_and_every_step_trains(run: Path) -> None:
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "batch/samples/count" in row]
    assert [(row["rollout/failed/count"], row["batch/samples/count"]) for row in rows] == [(0, 32)] * STEPS
    assert json.loads((run / "summary.json").read_text())["num_quarantined"] == 0


def test_server_and_trainer_agree_on_conversations(run: Path) -> None:
    rows = read_metrics(run / "metrics.jsonl")
    divergences = [row["loss/mismatch_kl/mean"] for row in rows if "loss/mismatch_kl/mean" in row]
    assert len(divergences) == STEPS
    # Float32 on both sides; the server decodes with a cache. Observed 1e-12.
    assert max(divergences) < 1e-5


def test_traces_hold_three_answers_and_every_picture(run: Path) -> None:
    traces = list(read_traces(run / "traces" / "step_000000.jsonl"))
    assert len(traces) == 32
    for trace in traces:
        assert [node.message.role for node in trace.nodes] == ["user", "assistant"] * 3
        assert len(trace.branches) == 1
        assert trace.reward_parts.keys() == {"exact", "turn_1", "turn_2", "turn_3"}
        assert sum(len(node.ranges) for node in trace.nodes) == len(trace.answer)
