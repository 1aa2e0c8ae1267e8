"""How a server is found or started, without vLLM: where one has to run, a script stands in for its Python."""

from __future__ import annotations

import asyncio
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from latepix import launcher
from latepix.config.loader import load_config
from latepix.config.schema import BudgetConfig, DoctorConfig, ParityConfig, RunConfig
from latepix.errors import ConfigError, HandshakeFailed, ProcessFailed
from latepix.families.facts import local_facts
from latepix.families.model_info import read_model_info
from latepix.inference.control import ServerControl
from latepix.inference.http import ServerConnection
from latepix.launcher import StartProgress, _check_served, at_server, inference_server
from tests.tiny.servers import ScriptedServer, closed_url, scripted_server

#: Stands in for the Python of vLLM's environment. It answers the probe, and serves /health on the port it is given.
FAKE_VLLM = """#!/bin/sh
if [ "$2" = "-c" ]; then
    echo '{"version": "0.32.0", "is_cpu": false, "plugin": "0.1.0"}'
    exit
fi
while [ "$1" != "--port" ]; do shift; done
echo "loading weights"
exec "%s" -S -c '
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
' "$2"
"""
#: The same, but it fails while it starts.
FAILING_VLLM = """#!/bin/sh
if [ "$2" = "-c" ]; then
    echo '{"version": "0.32.0", "is_cpu": false, "plugin": "0.1.0"}'
    exit
fi
echo "ValueError: No available memory for the cache blocks."
exit 1
"""


def fake_python(folder: Path, *, script: str) -> Path:
    path = folder / "fake-python"
    path.write_text(script, encoding="utf-8")
    path.chmod(0o755)
    return path


def make_config(model: Path, out: Path, *, cls: type[RunConfig] = RunConfig, **inference: Any) -> RunConfig:
    return cls.model_validate({"output_dir": out, "model": {"path": model}, "inference": inference})


def is_healthy(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server(lambda method, path, body: (200, {})) as running:
        yield running


def test_a_server_that_runs_is_used_and_left_running(tmp_path: Path, server: ScriptedServer) -> None:
    out = tmp_path / "run"
    with inference_server(make_config(tmp_path, out, url=server.url)) as base_url:
        assert base_url == server.url
    assert is_healthy(server.url)
    assert set(server.routes) == {"GET /health"}
    # Nothing was started for it, and no Python was looked at.
    assert not out.exists()


def test_a_vllm_that_runs_needs_no_vllm_here(tmp_path: Path, server: ScriptedServer) -> None:
    with inference_server(make_config(tmp_path, tmp_path, engine="vllm", url=server.url)) as base_url:
        assert base_url == server.url


def test_a_server_that_should_run_and_does_not_is_named(tmp_path: Path) -> None:
    url = closed_url()
    config = make_config(tmp_path, tmp_path, url=url, startup_timeout_s=0.1)
    wanted = rf"The inference server at {url} did not become healthy within 0\.1 s"
    with pytest.raises(ProcessFailed, match=wanted), inference_server(config):
        pass


def test_vllm_is_started_from_the_config_of_another_command_and_stopped(tiny_model: Path, tmp_path: Path) -> None:
    python = fake_python(tmp_path, script=FAKE_VLLM % sys.executable)
    out = tmp_path / "run"
    config = make_config(tiny_model, out, cls=ParityConfig, engine="vllm", vllm={"python": python})
    with inference_server(config) as base_url:
        assert is_healthy(base_url)
    assert not is_healthy(base_url)
    log = (out / "logs/inference.log").read_text(encoding="utf-8")
    command = f"{python} -P -m latepix_vllm.launch serve {tiny_model}"
    assert log.startswith(f"starting vLLM 0.32.0 on {base_url}: {command}")
    assert "loading weights" in log


class Started(Exception):
    """The server would be started now."""


@pytest.mark.parametrize(
    ("cls", "own"),
    [
        (RunConfig, {}),
        (ParityConfig, {"parity": {"steps": 3, "batch": 16}}),
        (DoctorConfig, {"doctor": {"max_pixel_difference": 0.5}}),
    ],
)
def test_the_server_reads_a_config_without_what_is_another_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: type[RunConfig], own: dict[str, Any]
) -> None:
    def start(config: RunConfig, path: Path, logs: Path) -> None:
        assert path == tmp_path / "config.json"
        raise Started

    monkeypatch.setattr(launcher, "_start_server", start)
    settings = {"output_dir": tmp_path, "model": {"path": "m"}, "seed": 7, "inference": {"max_model_len": 99}}
    with pytest.raises(Started), inference_server(cls.model_validate({**settings, **own})):
        pass
    read = load_config(RunConfig, ["@", str(tmp_path / "config.json")])
    assert (read.seed, read.inference.max_model_len) == (7, 99)
    # A free port was taken for it.
    assert read.inference.port > 0


def test_a_vllm_that_fails_at_its_start_is_explained(tiny_model: Path, tmp_path: Path) -> None:
    python = fake_python(tmp_path, script=FAILING_VLLM)
    config = make_config(tiny_model, tmp_path / "run", engine="vllm", vllm={"python": python})
    with pytest.raises(ProcessFailed) as caught, inference_server(config):
        pass
    message = str(caught.value)
    assert message.startswith("The inference process failed (exit 1): ValueError: No available memory")
    assert "lower inference.max_model_len" in message
    assert message.endswith(f"Its log: {tmp_path}/run/logs/inference.log")


def test_an_environment_without_vllm_is_told_before_anything_is_started(tmp_path: Path) -> None:
    config = make_config(tmp_path, tmp_path / "run", engine="vllm", vllm={"python": tmp_path / "no-python"})
    wanted = r"^inference\.vllm\.python: .*no-python is not a Python that runs"
    with pytest.raises(ConfigError, match=wanted), inference_server(config):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("cls", [RunConfig, ParityConfig, DoctorConfig, BudgetConfig])
def test_a_config_is_pointed_at_a_server(tmp_path: Path, cls: type[RunConfig]) -> None:
    config = make_config(tmp_path, tmp_path, cls=cls, port=8123, max_model_len=77)
    there = at_server(config, "http://10.0.0.7:9")
    assert there.inference.base_url == "http://10.0.0.7:9"
    assert there.inference.max_model_len == 77
    assert type(there) is cls
    assert config.inference.base_url == "http://127.0.0.1:8123"


def checked(model: Path, server: ScriptedServer, **changes: Any) -> str | None:
    """Look at a server of `model`, set up differently in some respect, as `eval` does."""
    facts = local_facts(model, engine="local", dtype="float32", weight_version="step-0", **changes)
    server.answer = lambda method, path, body: (200, msgspec.to_builtins(facts))

    async def main() -> str | None:
        connection = ServerConnection(server.url, timeout_s=20)
        try:
            return await _check_served(
                make_config(model, model, url=server.url), ServerControl(connection), read_model_info(model)
            )
        finally:
            await connection.close()

    return asyncio.run(main())


def test_an_evaluation_names_the_weights_that_it_measured(tiny_model: Path, server: ScriptedServer) -> None:
    # Weights stay as they are: the server needs no way to take others.
    assert checked(tiny_model, server, weight_transfer=None) == "step-0"
    assert server.routes == ["GET /latepix/facts"]


def test_an_evaluation_refuses_a_server_of_something_else(tiny_model: Path, server: ScriptedServer) -> None:
    with pytest.raises(HandshakeFailed, match=r"max_num_seqs: server 2, trainer needs at least 8"):
        checked(tiny_model, server, max_num_seqs=2)


class Writing:
    """A child that has just written a line."""

    def __init__(self, last_line: str) -> None:
        self.last_line = last_line


def make_progress(last_line: str = "Loading safetensors: 40 %") -> StartProgress:
    child: Any = Writing(last_line)
    return StartProgress("vllm", child)


def test_a_start_tells_how_long_it_takes_and_what_was_written_last() -> None:
    assert make_progress().text() == "starting the vllm engine, 0 s: Loading safetensors: 40 %"


def test_a_long_line_is_cut_to_its_end() -> None:
    assert make_progress("x" * 500 + "end").text() == "starting the vllm engine, 0 s: " + "x" * 157 + "end"


def test_a_run_at_a_server_that_runs_says_what_the_orchestrator_waits_for() -> None:
    orchestrator: Any = Writing("latepix: waiting for the trainer")
    assert StartProgress("vllm", None).text() == "waiting for the inference server, 0 s"
    assert StartProgress("vllm", None, orchestrator).text() == "waiting for the trainer, 0 s"


def test_once_the_server_answers_the_next_wait_is_told() -> None:
    server: Any = Writing("Application startup complete.")
    waiting: Any = Writing("latepix: waiting for the inference server at http://127.0.0.1:1")
    assert StartProgress("vllm", server, waiting).text().startswith("starting the vllm engine, 0 s: Application")
    further: Any = Writing("latepix: measuring the reward before training")
    assert StartProgress("vllm", server, further).text() == "measuring the reward before training, 0 s"


def test_a_start_is_not_printed_all_the_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "_TELL_S", 0.2)
    progress = make_progress("half way")
    progress.print_sometimes()
    time.sleep(0.21)
    progress.print_sometimes()
    progress.print_sometimes()
    said = capsys.readouterr()
    # Not among what a command prints as its result.
    assert (said.out, said.err) == ("", "latepix: starting the vllm engine, 0 s: half way\n")
