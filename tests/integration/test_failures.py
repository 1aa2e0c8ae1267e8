"""Runs that end badly: one message, exit status 1 (130 for ctrl-C), nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from latepix.cli import main
from tests.integration.cli import children_of, finish, is_alive, start, wait_until


def start_rl(model: Path, out: Path, *settings: object) -> subprocess.Popen[str]:
    """Start a long run with small steps."""
    return start(
        *("rl", "--model.path", model, "--output_dir", out, "--steps", 100_000, "--sampling.max_tokens", 2),
        *("--eval.num_tasks", 4, "--orchestrator.prompts_per_step", 2, "--orchestrator.group_size", 2, *settings),
    )


def wait_for_steps(process: subprocess.Popen[str], out: Path) -> dict[str, int]:
    """Wait until steps are trained; returns the children."""

    def has_trained() -> bool:
        assert process.poll() is None, finish(process)
        metrics = out / "metrics.jsonl"
        return metrics.exists() and metrics.read_text().count("loss/total") > 2

    wait_until(has_trained)
    children = children_of(process.pid)
    assert children.keys() == {"serve", "train", "orchestrate"}
    return children


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), [("train", "trainer"), ("serve", "inference")])
def test_a_process_that_is_killed_ends_the_run_at_once(
    tiny_model: Path, tmp_path: Path, command: str, name: str
) -> None:
    out = tmp_path / "run"
    process = start_rl(tiny_model, out)
    children = wait_for_steps(process, out)
    os.kill(children[command], signal.SIGKILL)
    killed = time.monotonic()
    code, _, err = finish(process)
    assert time.monotonic() - killed < 10
    assert code == 1
    assert f"latepix: error: The {name} process was ended by SIGKILL" in err
    assert str(out / "logs" / f"{name}.log") in err
    assert "Traceback" not in err
    assert not [pid for pid in children.values() if is_alive(pid)]


@pytest.mark.slow
def test_ctrl_c_stops_every_process(tiny_model: Path, tmp_path: Path) -> None:
    process = start_rl(tiny_model, tmp_path / "run")
    children = wait_for_steps(process, tmp_path / "run")
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert "latepix: error: interrupted" in err
    assert "Traceback" not in err
    assert not [pid for pid in children.values() if is_alive(pid)]


def test_a_launcher_that_is_killed_leaves_no_process(tiny_model: Path, tmp_path: Path) -> None:
    process = start_rl(tiny_model, tmp_path / "run")
    wait_until(lambda: len(children_of(process.pid)) == 3)
    children = children_of(process.pid)
    process.kill()
    finish(process)
    wait_until(lambda: not any(map(is_alive, children.values())), timeout_s=10)


@pytest.mark.slow
def test_a_run_in_which_every_rollout_fails_stops_and_says_why(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, _, err = finish(start_rl(tiny_model, out, "--environment.type", "tests.tiny.environments:RaisesInTraining"))
    assert code == 1
    assert "Step 0: 4 of 4 rollouts failed" in err
    assert "orchestrator.max_failed_frac" in err
    assert "4 x environment_raised, for example: environment raises-in-training, task train-" in err
    assert "ZeroDivisionError: the simulator of train-" in err
    assert str(out / "logs" / "orchestrator.log") in err
    assert "Traceback" not in err
    assert len((out / "quarantine.jsonl").read_text().splitlines()) == 4


def refusal(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Run a command in this process and return its one message; a traceback would end the test."""
    assert main([*map(str, args)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("latepix: error: ")
    assert captured.err.count("latepix: error: ") == 1
    return captured.err


@pytest.mark.parametrize("command", ["rl", "sft", "eval", "serve", "train", "orchestrate"])
def test_a_missing_model_folder_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    message = refusal(capsys, command, "--model.path", tmp_path / "nowhere", "--output_dir", tmp_path / "run")
    assert f"Model folder {tmp_path / 'nowhere'} does not exist (model.path)" in message
    assert "latepix tiny --family qwen3_vl" in message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_unknown_model_type_lists_the_known_ones(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"model_type": "llava"}
    (model / "config.json").write_text(json.dumps(config))
    message = refusal(capsys, "rl", "--model.path", model, "--output_dir", tmp_path / "run")
    assert "model_type 'llava' is not a known family. Known: " in message
    assert "qwen3_vl" in message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "preprocessor_config.json"])
def test_a_model_folder_that_lacks_a_file_is_refused(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path, name: str
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / name).unlink()
    message = refusal(capsys, "rl", "--model.path", model, "--output_dir", tmp_path / "run")
    assert f"Model folder {model} has no " in message


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        pytest.param(["--trainer.optim.lrr", "1"], ["trainer.optim.lrr", "lr"], id="misspelt"),
        pytest.param(["--sampling.temperature", "-1"], ["sampling.temperature", "-1"], id="out of range"),
        pytest.param(["--steps", "many"], ["steps", "many"], id="not a number"),
        pytest.param(
            ["--orchestrator.group_size", "300"], ["group_size", "300", "max_batch_size", "256"], id="too large"
        ),
        pytest.param(["--environment.type", "chess"], ["environment.type", "'chess'", "digits"], id="environment"),
        pytest.param(["--environment.type", "tests.nowhere:Nothing"], ["tests.nowhere"], id="module"),
        pytest.param(["--environment.type", "json:JSONDecoder"], ["not a subclass"], id="class"),
    ],
)
def test_a_wrong_setting_is_named(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path, settings: list[str], said: list[str]
) -> None:
    message = refusal(capsys, "rl", "--model.path", tiny_model, "--output_dir", tmp_path / "run", *settings)
    for part in said:
        assert part in message
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = ("--model.path", tiny_model, "--output_dir", tmp_path / "run", "--inference.port", port)
        for command in ("rl", "serve", "eval"):
            message = refusal(capsys, command, *settings)
            assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in message


def test_a_folder_that_already_holds_a_run_is_refused(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    message = refusal(capsys, "rl", "--model.path", tiny_model, "--output_dir", tmp_path)
    assert f"output_dir: {tmp_path} already holds a run" in message


@pytest.mark.slow
def test_an_orchestrator_that_ends_early_ends_the_run(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    environment = "tests.tiny.environments:Leaves"
    code, _, err = finish(start_rl(tiny_model, out, "--environment.type", environment))
    assert code == 1
    assert "The orchestrator process ended before the run did" in err


@pytest.mark.slow
def test_a_run_in_which_nothing_can_be_trained_stops_and_says_why(tiny_model: Path, tmp_path: Path) -> None:
    code, _, err = finish(start_rl(tiny_model, tmp_path / "run", "--orchestrator.seq_len", "10"))
    assert code == 1
    assert "no rollout has anything to train" in err
    assert "orchestrator.seq_len = 10" in err
