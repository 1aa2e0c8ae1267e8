from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from latepix.config.schema import WeightUpdate
from latepix.errors import SchemaMismatch, StaleWeights, TransportError
from latepix.inference.control import ServerControl
from latepix.inference.http import ServerConnection
from tests.tiny.servers import ScriptedServer, closed_url, scripted_server

T = TypeVar("T")
FOLDER = Path("/run/weights/step_000004")
UPDATE_ROUTES = [
    "POST /pause?mode=keep",
    "POST /start_weight_update",
    "POST /update_weights",
    "POST /finish_weight_update",
    "POST /resume",
    "GET /weight_info",
]


def weight_server(*, reports: str = "step-4", refuses: str = "") -> Callable[[str, str, Any], tuple[int, Any]]:
    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/weight_info":
            return 200, {"weight_version": reports}
        return (400, {"error": {"message": "no such folder"}}) if path == refuses else (200, {})

    return answer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server(weight_server()) as running:
        yield running


def with_control(
    url: str, use: Callable[[ServerControl], Awaitable[T]], *, weight_update: WeightUpdate = "safetensors_dir"
) -> T:
    async def main() -> T:
        connection = ServerConnection(url, timeout_s=20)
        try:
            return await use(ServerControl(connection, weight_update=weight_update))
        finally:
            await connection.close()

    return asyncio.run(main())


def update(url: str, *, weight_update: WeightUpdate = "safetensors_dir") -> None:
    with_control(url, lambda control: control.update_weights(FOLDER, 4), weight_update=weight_update)


def test_weights_are_updated_between_requests_and_asked_for(server: ScriptedServer) -> None:
    update(server.url)
    assert server.routes == UPDATE_ROUTES
    bodies = {path: body for _, path, body in server.requests}
    assert bodies["/update_weights"] == {"update_info": {"path": str(FOLDER)}}
    assert bodies["/finish_weight_update"] == {"weight_version": "step-4"}


def test_without_a_plugin_every_worker_reloads(server: ScriptedServer) -> None:
    update(server.url, weight_update="reload_weights")
    assert server.routes == [
        "POST /pause?mode=keep",
        "POST /collective_rpc",
        "POST /update_weight_version",
        "POST /resume",
        "GET /weight_info",
    ]
    bodies = {path: body for _, path, body in server.requests}
    assert bodies["/collective_rpc"] == {"method": "reload_weights", "kwargs": {"weights_path": str(FOLDER)}}
    assert bodies["/update_weight_version"] == {"new_version": "step-4"}


def test_weights_that_the_trainer_broadcast_are_only_asked_for(server: ScriptedServer) -> None:
    update(server.url, weight_update="nccl")
    assert server.routes == ["GET /weight_info"]


@pytest.mark.parametrize("weight_update", ["safetensors_dir", "reload_weights", "nccl"])
@pytest.mark.parametrize("reports", ["step-3", "default"])
def test_a_server_that_serves_other_weights_is_named(
    server: ScriptedServer, reports: str, weight_update: WeightUpdate
) -> None:
    server.answer = weight_server(reports=reports)
    with pytest.raises(StaleWeights, match=r"was given weights step-4 from /run/weights/step_000004 and said done"):
        update(server.url, weight_update=weight_update)


@pytest.mark.parametrize("refuses", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_a_refused_update_is_told_and_the_server_goes_on(server: ScriptedServer, refuses: str) -> None:
    server.answer = weight_server(refuses=refuses)
    with pytest.raises(TransportError, match=rf"{refuses} answered HTTP 400: no such folder"):
        update(server.url)
    assert server.routes[-1] == "POST /resume"
    assert server.routes[:-1] == UPDATE_ROUTES[: len(server.routes) - 1]


def test_a_server_that_cannot_go_on_either_does_not_hide_why_the_update_failed(server: ScriptedServer) -> None:
    server.answer = lambda method, path, body: (200, {}) if path.startswith("/pause") else (500, {"error": path})
    with pytest.raises(TransportError, match="/start_weight_update answered HTTP 500"):
        update(server.url)


def test_a_server_without_the_routes_is_told_which_variable_is_missing(server: ScriptedServer) -> None:
    server.answer = lambda method, path, body: (404, {"detail": "Not Found"})
    with pytest.raises(TransportError, match=r"HTTP 404: Not Found vLLM has .* only with VLLM_SERVER_DEV_MODE=1"):
        update(server.url)


def test_weights_for_a_server_that_is_down_are_a_transport_error() -> None:
    url = closed_url()
    wanted = (
        rf"from {FOLDER}: {url}/pause\?mode=keep did not answer .* What it serves now is not known: start it anew \(or"
    )
    with pytest.raises(TransportError, match=wanted):
        update(url)


@pytest.mark.parametrize(
    ("weight_update", "what"),
    [("safetensors_dir", "It goes on with the weights it had."), ("reload_weights", "What it serves now is not known")],
)
def test_a_refused_update_says_what_is_served_now(
    server: ScriptedServer, weight_update: WeightUpdate, what: str
) -> None:
    server.answer = weight_server(
        refuses="/update_weights" if weight_update == "safetensors_dir" else "/collective_rpc"
    )
    with pytest.raises(TransportError) as caught:
        update(server.url, weight_update=weight_update)
    assert what in str(caught.value)


def test_a_pause_that_fails_is_followed_by_going_on(server: ScriptedServer) -> None:
    server.answer = weight_server(refuses="/pause?mode=keep")
    with pytest.raises(TransportError, match="no such folder"):
        update(server.url)
    assert server.routes == ["POST /pause?mode=keep", "POST /resume"]


@pytest.mark.parametrize("ask", [ServerControl.weight_version, ServerControl.peak_rss_bytes, ServerControl.facts])
def test_asking_a_server_that_is_down_is_a_transport_error(ask: Callable[[ServerControl], Awaitable[Any]]) -> None:
    with pytest.raises(TransportError, match="did not answer"):
        with_control(closed_url(), ask)


def test_weight_transfer_is_prepared(server: ScriptedServer) -> None:
    with_control(server.url, ServerControl.init_weight_transfer)
    assert server.requests == [("POST", "/init_weight_transfer_engine", {"init_info": {}})]


@pytest.mark.parametrize("weight_update", ["reload_weights", "nccl"])
def test_other_ways_need_no_preparation_from_here(server: ScriptedServer, weight_update: WeightUpdate) -> None:
    with_control(server.url, ServerControl.init_weight_transfer, weight_update=weight_update)
    assert server.requests == []


def test_the_memory_of_a_server_that_tells_it(server: ScriptedServer) -> None:
    server.answer = lambda method, path, body: (200, {"peak_rss_bytes": 123})
    assert with_control(server.url, ServerControl.peak_rss_bytes) == 123
    server.answer = lambda method, path, body: (200, b"")
    assert with_control(server.url, ServerControl.peak_rss_bytes) is None


def test_a_vllm_without_our_plugin_says_what_it_can(server: ScriptedServer) -> None:
    model = {"model": "/m", "dtype": "torch.bfloat16", "max_model_len": 512, "logprobs_mode": "raw_logprobs"}
    routes = {
        "/server_info?config_format=json": {
            "vllm_config": {
                "model_config": model,
                "scheduler_config": {"max_num_seqs": 8},
                "parallel_config": {"data_parallel_size": 2},
                "cache_config": {"enable_prefix_caching": True},
                "weight_transfer_config": None,
            }
        },
        "/version": {"version": "0.32.0"},
        "/weight_info": {"weight_version": "default"},
    }
    server.answer = lambda method, path, body: (200, routes[path]) if path in routes else (404, {})
    facts = with_control(server.url, ServerControl.facts)
    assert (facts.engine, facts.versions, facts.model, facts.dtype) == ("vllm", {"engine": "0.32.0"}, "/m", "bfloat16")
    assert (facts.max_model_len, facts.max_num_seqs, facts.data_parallel_size) == (512, 8, 2)
    assert (facts.logprobs_mode, facts.weight_version, facts.weight_transfer) == ("raw_logprobs", "default", None)
    assert facts.tokenizer is None
    assert facts.image_processor is None


def test_facts_of_another_version_are_no_facts(server: ScriptedServer) -> None:
    server.answer = lambda method, path, body: (200, {"engine": 5})
    with pytest.raises(SchemaMismatch, match="Install the same version of latepix and latepix-vllm"):
        with_control(server.url, ServerControl.facts)
