"""`latepix parity` against the local engine: passes where server and trainer agree, finds out servers that lie."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from latepix.config.loader import load_config
from latepix.config.schema import ParityConfig, RunConfig
from latepix.environments.base import Policy, Score, Task
from latepix.environments.digits import Digits
from latepix.errors import ConfigError, HandshakeFailed, RolloutError, StaleWeights
from latepix.inference.control import ServerControl
from latepix.inference.http import ServerConnection
from latepix.launcher import inference_server
from latepix.parity.kl import run_parity
from latepix.trace.messages import user_message
from tests.integration.cli import finish, start
from tests.tiny.servers import ScriptedServer, scripted_server

pytestmark = pytest.mark.slow

MIXED = "tests.integration.test_parity:Mixed"
STEPS, BATCH = 2, 24
#: Changes a request's body on its way to the server, or the answer on its way back.
Change = Callable[[str, Any], Any]


class Mixed(Digits):
    """Tasks without a picture, with one, and with one in each of two turns; rewards without meaning, for a gradient."""

    name = "mixed"

    def task(self, split: Any, index: int) -> Task:
        task = super().task(split, index)
        if index % 3 == 0:
            return Task(id=f"{split}-text-{index}", messages=(user_message("Say a number."),), answer="1")
        return Task(id=f"{split}-{index % 3}-{index}", messages=task.messages, answer=task.answer)

    async def rollout(self, task: Task, policy: Policy) -> Score:
        answer = await policy.respond(task.messages)
        if task.id.split("-")[1] == "2":
            answer = await policy.respond([user_message(self._picture(0), "and this one?")])
        return Score(reward=float(zlib.crc32(answer.text.encode()) % 2))


def config_of(model: Path, out: Path, *settings: object) -> ParityConfig:
    """Return the config of a small run whose weights move."""
    args = (
        *("--model.path", model, "--output_dir", out, "--environment.type", MIXED, "--orchestrator.group_size", 4),
        *("--parity.steps", STEPS, "--parity.batch", BATCH, "--sampling.max_tokens", 6, "--trainer.optim.lr", 1e-3),
    )
    return load_config(ParityConfig, [str(arg) for arg in (*args, *settings)])


def result_of(out: Path) -> dict[str, Any]:
    """Read a report; JSON has no word for NaN, and a reader need not know one."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads((out / "parity.json").read_text(), parse_constant=refuse)


def means_of(result: dict[str, Any]) -> list[float]:
    return [step["agreement"]["mismatch_kl_mean"] for step in result["steps"]]


def send(url: str, method: str, path: str, body: Any) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, method=method, headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


async def give_first_weights_back(url: str, model: Path) -> None:
    """Let a server that was trained against serve version 0 again."""
    connection = ServerConnection(url)
    try:
        control = ServerControl(connection)
        await control.init_weight_transfer()
        await control.update_weights(model, 0)
    finally:
        await connection.close()


@pytest.fixture(scope="module")
def engine_url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    out = tmp_path_factory.mktemp("engine")
    config = load_config(RunConfig, ["--model.path", str(tiny_model), "--output_dir", str(out)])
    with inference_server(config) as url:
        yield url


@pytest.fixture
def server_url(engine_url: str, tiny_model: Path) -> str:
    """Return the address of a server that serves the first weights."""
    asyncio.run(give_first_weights_back(engine_url, tiny_model))
    return engine_url


@pytest.fixture
def proxy(server_url: str) -> Generator[Callable[..., ScriptedServer]]:
    """Return a maker of servers in front of the real one that change what passes through."""

    def make(*, request: Change = lambda path, body: body, answer: Change = lambda path, body: body) -> ScriptedServer:
        def pass_on(method: str, path: str, body: Any) -> tuple[int, Any]:
            status, content = send(server_url, method, path, request(path, body))
            return status, answer(path, content)

        server.answer = pass_on
        return server

    with scripted_server(lambda method, path, body: (500, {})) as server:
        yield make


def test_server_and_trainer_agree(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert run_parity(config_of(tiny_model, out)) == 0
    printed = capsys.readouterr()
    assert printed.out == (out / "parity.md").read_text()
    assert printed.out.startswith("# Parity: passed\n")
    assert "step 2/2  mismatch_kl" in printed.err
    result = result_of(out)
    assert (result["passed"], result["threshold"], result["num_updates_shown"]) == (True, 0.015, 1)
    assert [step["step"] for step in result["steps"]] == [0, 1]
    for step in result["steps"]:
        # Float32 on both sides and the same arithmetic: observed 1e-13.
        assert step["agreement"]["mismatch_kl_mean"] < 1e-6
        assert step["agreement"]["num_tokens"] >= BATCH
        assert (step["num_rollouts"], step["num_failed"]) == (BATCH, 0)
        # Of six groups of four, in a random order: text, one picture, two.
        assert 0 < step["num_pictures"] < 2 * BATCH
        assert step["entropy_mean"] > 1
    # The step moved the weights, and the server has the new ones.
    assert [step["mismatch_kl_mean_before"] is None for step in result["steps"]] == [True, False]
    assert result["steps"][1]["mismatch_kl_mean_before"] > 1e-5
    tables = result["tables"]
    assert [row["name"] for row in tables["by_images"] if row["agreement"]["num_tokens"]] == ["none", "one", "several"]
    assert [row["name"] for row in tables["by_turn"]] == ["1", "2"]
    total = sum(step["agreement"]["num_tokens"] for step in result["steps"])
    for table in tables.values():
        assert sum(row["agreement"]["num_tokens"] for row in table) == total
    # Same libraries and model folder on both sides.
    assert result["differences"] == []
    assert result["settings"]["server"].startswith("local, latepix")
    with pytest.raises(ConfigError, match="already holds a run"):
        run_parity(config_of(tiny_model, out))


def test_temperature_is_the_same_on_both_sides(tiny_model: Path, tmp_path: Path, server_url: str) -> None:
    config = config_of(tiny_model, tmp_path / "run", "--inference.url", server_url, "--sampling.temperature", 0.7)
    assert run_parity(config) == 0
    assert max(means_of(result_of(tmp_path / "run"))) < 1e-6


def test_a_server_with_another_temperature_is_found_out(
    tiny_model: Path, tmp_path: Path, proxy: Callable[..., ScriptedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    def cooler(path: str, body: Any) -> Any:
        return (
            body | {"sampling_params": body["sampling_params"] | {"temperature": 0.4}} if "generate" in path else body
        )

    out = tmp_path / "run"
    # A random model's probabilities are nearly even, at any temperature.
    url = proxy(request=cooler).url
    assert run_parity(config_of(tiny_model, out, "--inference.url", url, "--parity.max_kl", 1e-3)) == 1
    result = result_of(out)
    assert result["passed"] is False
    assert min(means_of(result)) > 1e-3
    assert "2 of 2 steps" in result["verdict"]
    assert "temperature" in result["verdict"]
    printed = capsys.readouterr()
    assert printed.out.startswith("# Parity: FAILED\n")
    assert f"latepix: error: {result['verdict']}" in printed.err


def test_a_server_one_step_behind_is_found_out(
    tiny_model: Path, tmp_path: Path, proxy: Callable[..., ScriptedServer], server_url: str
) -> None:
    given = [tiny_model]

    def stale(path: str, body: Any) -> Any:
        # Hands over the weights before the ones it was given, and says that it serves the new ones.
        if path != "/update_weights":
            return body
        kept = tmp_path / f"given_{len(given)}"
        shutil.copytree(body["update_info"]["path"], kept)
        given.append(kept)
        return {"update_info": {"path": str(given[-2])}}

    out = tmp_path / "run"
    settings = ("--inference.url", proxy(request=stale).url, "--parity.steps", 3, "--parity.max_kl", 1e-6)
    assert run_parity(config_of(tiny_model, out, *settings)) == 1
    result = result_of(out)
    first, *later = means_of(result)
    assert first < 1e-6 < min(later)
    assert [step["mismatch_kl_mean_before"] is None for step in result["steps"]] == [True, False, False]
    assert max(step["mismatch_kl_mean_before"] for step in result["steps"][1:]) < 1e-6
    assert result["num_updates_shown"] == 0
    assert "2 of 3 steps" in result["verdict"]
    assert "In step 1, 2 the server's logprobs are those of the weights one version before" in result["verdict"]


def test_a_rollout_of_another_version_stops_the_run(
    tiny_model: Path, tmp_path: Path, proxy: Callable[..., ScriptedServer]
) -> None:
    def older(path: str, body: Any) -> Any:
        for choice in body.get("choices", []):
            choice["weight_versions"][0]["version"] = "step-0"
        return body

    url = proxy(answer=older).url
    with pytest.raises(
        StaleWeights, match=r"Step 1, trace s1-g\d+-r\d, branch 0: sampled by policy version 0, wanted 1"
    ):
        run_parity(config_of(tiny_model, tmp_path / "run", "--inference.url", url))


def test_a_server_that_is_set_up_differently_is_refused(
    tiny_model: Path, tmp_path: Path, proxy: Callable[..., ScriptedServer]
) -> None:
    def other(path: str, body: Any) -> Any:
        return body | {"dtype": "bfloat16"} if path == "/latepix/facts" else body

    server = proxy(answer=other)
    with pytest.raises(HandshakeFailed, match="dtype: server bfloat16, trainer float32"):
        run_parity(config_of(tiny_model, tmp_path / "run", "--inference.url", server.url))
    assert not any("generate" in route for route in server.routes)


def test_harmless_differences_are_listed(
    tiny_model: Path, tmp_path: Path, proxy: Callable[..., ScriptedServer]
) -> None:
    def elsewhere(path: str, body: Any) -> Any:
        return body | {"model": "/another/folder"} if path == "/latepix/facts" else body

    out = tmp_path / "run"
    assert run_parity(config_of(tiny_model, out, "--inference.url", proxy(answer=elsewhere).url)) == 0
    (difference,) = result_of(out)["differences"]
    assert (difference["setting"], difference["server"]) == ("model folder", "/another/folder")
    assert "/another/folder" in (out / "parity.md").read_text()


def test_failed_rollouts_are_counted_and_too_many_stop_the_run(
    tiny_model: Path, tmp_path: Path, server_url: str
) -> None:
    settings = ("--inference.url", server_url, "--environment.type")
    # Every tenth rollout.
    run_parity(config_of(tiny_model, tmp_path / "some", *settings, "tests.tiny.environments:SometimesRaises"))
    steps = result_of(tmp_path / "some")["steps"]
    assert [(step["num_rollouts"], step["num_failed"]) for step in steps] == [(BATCH, 2), (BATCH, 2)]
    asyncio.run(give_first_weights_back(server_url, tiny_model))
    with pytest.raises(RolloutError, match=f"{BATCH} of {BATCH} rollouts failed"):
        run_parity(config_of(tiny_model, tmp_path / "all", *settings, "tests.tiny.environments:AlwaysRaises"))


def test_the_command_ends_with_status_1(tiny_model: Path, tmp_path: Path, server_url: str) -> None:
    out = tmp_path / "run"
    code, printed, err = finish(
        start(
            *("parity", "--model.path", tiny_model, "--output_dir", out, "--inference.url", server_url),
            *("--parity.steps", 1, "--parity.batch", 8, "--parity.max_kl", 1e-30, "--sampling.max_tokens", 4),
        )
    )
    assert code == 1, err
    assert printed == (out / "parity.md").read_text()
    assert "latepix: error: Server and trainer disagree: 1 of 1 steps" in err
