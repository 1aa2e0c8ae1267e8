"""Whole runs with a real vLLM: it learns, it is stopped cleanly, and what goes wrong is told with its remedy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli import EXAMPLE, finish, is_alive, latepix, start, wait_until
from tests.tiny.running import VLLM_PYTHON

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VLLM = ("--inference.engine", "vllm", "--inference.vllm.python", VLLM_PYTHON, "--inference.max_model_len", 256)
#: A start of vLLM on two busy cores, and the run.
TIMEOUT_S = 400


@pytest.fixture(scope="module")
def warm_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model that has seen twenty labelled digits."""
    out = tmp_path_factory.mktemp("warm") / "sft"
    latepix("sft", "@", EXAMPLE / "sft.toml", "--model.path", tiny_model, "--output_dir", out)
    return out / "model"


def processes_of(launcher: int) -> dict[int, list[int]]:
    """Return the children of a launcher, each with all processes of its group (vLLM renames its own)."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,pgid="], capture_output=True, text=True, check=True).stdout
    rows = [tuple(map(int, line.split())) for line in listing.splitlines()]
    children = [pid for pid, parent, _ in rows if parent == launcher]
    return {child: [pid for pid, _, group in rows if group == child] for child in children}


def run_digits(model: Path, out: Path, *settings: object) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Run the digits example with vLLM to its end; returns its summary and its metrics."""
    command = ("rl", "@", EXAMPLE / "run.toml", "--model.path", model, "--output_dir", out, *VLLM)
    code, said, err = finish(start(*command, "--eval.every_steps", 0, *settings), timeout_s=TIMEOUT_S)
    assert code == 0, f"{said}\n{err}\n{(out / 'logs' / 'inference.log').read_text()[-3000:]}"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return json.loads((out / "summary.json").read_text()), rows


def test_it_learns_like_with_the_local_engine(warm_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = ("--steps", 30, "--trainer.optim.warmup_steps", 2, "--eval.num_tasks", 60)
    summary, rows = run_digits(warm_model, out, *settings)
    assert summary["num_quarantined"] == 0
    # Measured: 0.23 -> 0.6 and more.
    assert summary["reward_last"] > summary["reward_first"] + 0.15
    assert summary["mismatch_kl_max"] < 1e-6
    assert max(row["canary/kl"] for row in rows if "canary/kl" in row) < 1e-6
    # With the tiny model an update takes a tenth of a second.
    assert min(row["time/update_weights_s"] for row in rows if "time/update_weights_s" in row) < 1
    assert "handshake: version of transformers" in (out / "logs" / "orchestrator.log").read_text()


def test_two_data_parallel_ranks_serve_the_same_weights(warm_model: Path, tmp_path: Path) -> None:
    settings = ("--inference.vllm.data_parallel_size", 2, "--steps", 4, "--trainer.optim.warmup_steps", 1)
    summary, rows = run_digits(warm_model, tmp_path / "run", *settings, "--eval.num_tasks", 8)
    assert summary["mismatch_kl_max"] < 1e-6
    # The canary asks each rank.
    assert max(row["canary/kl"] for row in rows if "canary/kl" in row) < 1e-6


def test_a_vllm_that_is_killed_ends_the_run_with_its_reason(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(
        *("rl", "--model.path", tiny_model, "--output_dir", out, "--steps", 100_000, *VLLM),
        *("--eval.num_tasks", 4, "--orchestrator.prompts_per_step", 2, "--orchestrator.group_size", 2),
    )

    def has_trained() -> bool:
        assert process.poll() is None, finish(process)
        return (out / "metrics.jsonl").exists() and "loss/total" in (out / "metrics.jsonl").read_text()

    wait_until(has_trained, timeout_s=TIMEOUT_S)
    processes = processes_of(process.pid)
    assert len(processes) == 3
    # The server comes first, and has an engine in a process of its own.
    server = min(processes)
    assert len(processes[server]) > 1
    os.kill(server, signal.SIGKILL)
    killed = time.monotonic()
    code, _, err = finish(process)
    assert time.monotonic() - killed < 20
    assert code == 1
    assert "The inference process was ended by SIGKILL (out of memory?)" in err
    assert not any(is_alive(pid) for group in processes.values() for pid in group)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("--inference.vllm.args=--logprobs-mode raw_logprobs", "--sampling.temperature", 0.7),
            "logprobs_mode: server raw_logprobs, trainer needs processed_logprobs",
        ),
        (
            ('--inference.vllm.args=--mm-processor-kwargs \'{"min_pixels": 4096, "max_pixels": 65536}\'',),
            "image processor: most pixels: server 65536, trainer 1048576",
        ),
    ],
    ids=["raw logprobs", "other pixel limits"],
)
def test_a_server_that_is_set_up_wrongly_is_refused_before_anything_is_trained(
    tiny_model: Path, tmp_path: Path, settings: tuple[object, ...], message: str
) -> None:
    out = tmp_path / "run"
    command = ("rl", "--model.path", tiny_model, "--output_dir", out, "--steps", 5, *VLLM, *settings)
    code, _, err = finish(start(*command), timeout_s=TIMEOUT_S)
    assert code == 1
    assert "Server and trainer do not fit each other" in err
    assert message in err
    assert not list((out / "weights").glob("step_*"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--inference.vllm.args=--no-such-flag 5",), "vLLM does not know an argument"),
        (("--inference.vllm.env.VLLM_CPU_KVCACHE_SPACE", "100000"), "Not enough memory"),
    ],
    ids=["unknown argument", "no memory"],
)
def test_a_vllm_that_cannot_start_says_why_and_what_to_do(
    tiny_model: Path, tmp_path: Path, settings: tuple[object, ...], message: str
) -> None:
    out = tmp_path / "run"
    command = ("eval", "--model.path", tiny_model, "--output_dir", out, *VLLM, *settings)
    code, _, err = finish(start(*command), timeout_s=TIMEOUT_S)
    assert code == 1
    assert message in err
    assert "The last lines of its log:" in err
    assert "Traceback" not in err.partition("The last lines")[0]
