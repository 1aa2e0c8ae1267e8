from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest

from latepix.errors import InferenceError, PlaceholderMismatch
from latepix.inference.client import BAN_BIAS, Generation, InferenceClient, Prompt, Routing, Sampling
from latepix.trace.graph import PolicySpan
from latepix.trace.refs import PlaceholderRange
from tests.tiny.pictures import make_image
from tests.tiny.servers import ScriptedServer, closed_url, scripted_server
from tests.tiny.traces import IMAGE_ID

T = TypeVar("T")
A, B = make_image(seed=1), make_image(seed=2)
PROMPT = Prompt(token_ids=(5, IMAGE_ID, 6), images=(A,))


def respond(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Answer a request: each picture takes 2 tokens, answer i samples [30 + i, 7]."""
    expanded: list[int] = []
    ranges = []
    for token in body["token_ids"]:
        if token == IMAGE_ID:
            ranges.append({"offset": len(expanded), "length": 2})
            expanded.append(token)
        expanded.append(token)
    choices = [
        {
            "index": index,
            "token_ids": [30 + index, 7],
            "logprobs": {"content": [{"token_id": 30 + index, "logprob": -1.0}, {"token_id": 7, "logprob": -0.25}]},
            "finish_reason": "stop",
            "weight_versions": [{"version": "step-3", "start": 0, "end": 2}],
        }
        for index in range(body["sampling_params"].get("n", 1))
    ]
    answer = {"request_id": "r", "choices": choices, "prompt_token_ids": expanded, "mm_placeholders": {"image": ranges}}
    return answer | changes


def serve(method: str, path: str, body: Any) -> tuple[int, Any]:
    return 200, respond(body)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server(serve) as running:
        yield running


def with_client(url: str, use: Callable[[InferenceClient], Awaitable[T]]) -> T:
    async def main() -> T:
        client = InferenceClient(
            url, stop_ids=(7,), banned_ids=(IMAGE_ID, 8), placeholder_ids=(IMAGE_ID,), timeout_s=20
        )
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(main())


def sampling(seed: int = 0, *, temperature: float = 1.0) -> Sampling:
    return Sampling(temperature=temperature, max_tokens=4, seed=seed)


def generate(url: str, *requests: tuple[Prompt, Sampling]) -> list[Generation]:
    """Make requests together."""

    async def use(client: InferenceClient) -> list[Generation]:
        return await asyncio.gather(*(client.generate(prompt, how) for prompt, how in requests))

    return with_client(url, use)


def params_of(server: ScriptedServer) -> list[dict[str, Any]]:
    return sorted((body["sampling_params"] for _, _, body in server.requests), key=lambda params: params["seed"])


# --- requests ----------------------------------------------------------------------------------------------------


def test_a_request_holds_the_logical_prompt_and_its_pictures(server: ScriptedServer) -> None:
    generate(server.url, (PROMPT, sampling(5, temperature=0.5)))
    ((method, path, body),) = server.requests
    assert (method, path) == ("POST", "/inference/v1/generate")
    assert body["token_ids"] == [5, IMAGE_ID, 6]
    assert body["content_parts"] == [{"type": "image_url", "url": A.url}]
    params = body["sampling_params"]
    assert (params["temperature"], params["max_tokens"], params["seed"]) == (0.5, 4, 5)
    assert params["stop_token_ids"] == [7]
    assert params["logprobs"] == 0
    # Spelled out even though it is what the local server does anyway: vLLM answers without ids by default.
    assert body["return_token_ids"] is True
    # Media placeholders are never sampled.
    assert params["logit_bias"] == {"9": BAN_BIAS, "8": BAN_BIAS}


def test_an_answer_holds_the_servers_expansion(server: ScriptedServer) -> None:
    (answer,) = generate(server.url, (PROMPT, sampling()))
    assert answer == Generation(
        prompt_token_ids=[5, IMAGE_ID, IMAGE_ID, 6],
        ranges=[PlaceholderRange(1, 2)],
        token_ids=[30, 7],
        logprobs=[-1.0, -0.25],
        finish_reason="stop",
        policy_version=3,
        policy_spans=(PolicySpan(policy_version=3, start=0, end=2),),
    )


def test_requests_for_one_prompt_travel_once(server: ScriptedServer) -> None:
    answers = generate(server.url, *((PROMPT, sampling(seed)) for seed in (12, 10, 11, 13)))
    (params,) = params_of(server)
    assert (params["n"], params["seed"]) == (4, 10)
    # Answer i has seed 10 + i, whatever the order of the requests.
    assert [answer.token_ids[0] for answer in answers] == [32, 30, 31, 33]


def test_seeds_that_are_not_consecutive_are_split(server: ScriptedServer) -> None:
    answers = generate(server.url, *((PROMPT, sampling(seed)) for seed in (3, 9, 4, 20, 10)))
    assert [(params["seed"], params.get("n", 1)) for params in params_of(server)] == [(3, 2), (9, 2), (20, 1)]
    assert [answer.token_ids[0] for answer in answers] == [30, 30, 31, 30, 31]


def test_equal_seeds_are_not_joined(server: ScriptedServer) -> None:
    answers = generate(server.url, (PROMPT, sampling(3)), (PROMPT, sampling(3)))
    assert [params.get("n", 1) for params in params_of(server)] == [1, 1]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("prompt", "how"),
    [
        (Prompt(token_ids=(5, IMAGE_ID, 6), images=(B,)), sampling(1)),
        (Prompt(token_ids=(5, IMAGE_ID, 4), images=(A,)), sampling(1)),
        (PROMPT, sampling(1, temperature=0.5)),
    ],
    ids=["picture", "tokens", "temperature"],
)
def test_requests_that_differ_are_not_joined(server: ScriptedServer, prompt: Prompt, how: Sampling) -> None:
    generate(server.url, (PROMPT, sampling(0)), (prompt, how))
    assert len(server.requests) == 2


def test_a_request_that_was_given_up_does_not_disturb_its_siblings(server: ScriptedServer) -> None:
    async def use(client: InferenceClient) -> Generation:
        first, second = (asyncio.ensure_future(client.generate(PROMPT, sampling(seed))) for seed in (0, 1))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert with_client(server.url, use).token_ids == [31, 7]


# --- answers that do not fit -------------------------------------------------------------------------------------


def error_for(server: ScriptedServer, status: int, content: Any) -> str:
    server.answer = lambda method, path, body: (status, content)
    with pytest.raises(InferenceError) as caught:
        generate(server.url, (PROMPT, sampling()))
    return str(caught.value)


def error_for_change(server: ScriptedServer, **changes: Any) -> str:
    return error_for(server, 200, respond({"token_ids": [5, IMAGE_ID, 6], "sampling_params": {}}, **changes))


def choice(content: Any, *, token_ids: tuple[int, ...] = (30, 7), index: int = 0) -> dict[str, Any]:
    return {"index": index, "token_ids": list(token_ids), "logprobs": {"content": content}}


def test_the_servers_own_message_is_passed_on(server: ScriptedServer) -> None:
    message = error_for(server, 400, {"error": {"message": "2 placeholders, 1 content parts", "code": 400}})
    assert message.endswith("/inference/v1/generate answered HTTP 400: 2 placeholders, 1 content parts")
    assert message.startswith(server.url)


@pytest.mark.parametrize("content", [b"<html>Bad Gateway</html>", {"detail": "Bad Gateway"}, b'["Bad Gateway"]'])
def test_other_error_bodies_are_shown_too(server: ScriptedServer, content: Any) -> None:
    assert "HTTP 502: " in error_for(server, 502, content)
    assert "Bad Gateway" in error_for(server, 502, content)


@pytest.mark.parametrize("content", [b"", b"hello", {}, {"choices": 7}])
def test_an_answer_of_another_shape_is_named(server: ScriptedServer, content: Any) -> None:
    assert "answered something that is not a generate response" in error_for(server, 200, content)


def test_a_server_without_expanded_ids_is_named(server: ScriptedServer) -> None:
    assert "no prompt_token_ids in the answer" in error_for_change(server, prompt_token_ids=None)


@pytest.mark.parametrize("placed", [None, {}, {"image": []}, {"image": [{"offset": 1, "length": 1}] * 2}])
def test_a_wrong_number_of_ranges_is_named(server: ScriptedServer, placed: Any) -> None:
    num_ranges = len((placed or {}).get("image", []))
    assert f"1 pictures were sent, {num_ranges} ranges came back" in error_for_change(server, mm_placeholders=placed)


@pytest.mark.parametrize("indices", [[], [1], [0, 1], [0, 0]])
def test_a_wrong_number_of_answers_is_named(server: ScriptedServer, indices: list[int]) -> None:
    entries = [{"token_id": 30, "logprob": -1.0}, {"token_id": 7, "logprob": -0.25}]
    message = error_for_change(server, choices=[choice(entries, index=index) for index in indices])
    assert f"asked for 1 answers, got indices {indices}" in message


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        [{"token_id": 30, "logprob": -1.0}],
        [{"token_id": 30, "logprob": -1.0}, {"token_id": 8, "logprob": -0.25}],
        [{"token": "seven", "logprob": -1.0}, {"token": "end", "logprob": -0.25}],
    ],
    ids=["none", "empty", "too few", "of another token", "without ids"],
)
def test_logprobs_of_other_tokens_are_refused(server: ScriptedServer, content: Any) -> None:
    message = error_for_change(server, choices=[choice(content)])
    assert f"answer 0: 2 tokens, but {len(content or [])} logprobs, or logprobs of other tokens" in message


def test_no_logprobs_at_all_are_refused(server: ScriptedServer) -> None:
    message = error_for_change(server, choices=[{"index": 0, "token_ids": [30, 7]}])
    assert "2 tokens, but 0 logprobs" in message


def test_a_positive_logprob_is_refused(server: ScriptedServer) -> None:
    entries = [{"token_id": 30, "logprob": 0.5}, {"token_id": 7, "logprob": -0.25}]
    assert "a logprob is positive or not finite" in error_for_change(server, choices=[choice(entries)])


def test_both_spellings_of_logprobs_are_accepted(server: ScriptedServer) -> None:
    entries = [{"token": "token_id:30", "logprob": -1.0}, {"token": "token_id:7", "logprob": -0.25}]
    server.answer = lambda method, path, body: (200, respond(body, choices=[choice(entries)]))
    (answer,) = generate(server.url, (PROMPT, sampling()))
    assert answer.logprobs == [-1.0, -0.25]
    # This server says nothing of its weights.
    assert answer.policy_version is None


def test_the_oldest_weights_that_sampled_count(server: ScriptedServer) -> None:
    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        full = respond(body)
        spans = [{"version": f"step-{version}", "start": 0, "end": 1} for version in (10, 9)]
        full["choices"][0]["weight_versions"] = spans
        return 200, full

    server.answer = answer
    assert generate(server.url, (PROMPT, sampling()))[0].policy_version == 9


def test_every_sibling_hears_of_a_failure(server: ScriptedServer) -> None:
    server.answer = lambda method, path, body: (400, {"error": {"message": "no such token"}})

    async def use(client: InferenceClient) -> list[Any]:
        requests = (client.generate(PROMPT, sampling(seed)) for seed in range(3))
        return await asyncio.gather(*requests, return_exceptions=True)

    errors = with_client(server.url, use)
    assert [type(error) for error in errors] == [InferenceError] * 3
    assert len(server.requests) == 1


def test_a_server_that_is_down_is_named() -> None:
    url = closed_url()
    with pytest.raises(InferenceError, match=rf"^{url}/inference/v1/generate did not answer \(ClientConnectorError"):
        generate(url, (PROMPT, sampling()))


# --- where requests go --------------------------------------------------------------------------------------------


def ask_with(url: str, *routings: Routing) -> None:
    async def use(client: InferenceClient) -> None:
        await asyncio.gather(*(client.generate(PROMPT, sampling(seed), how) for seed, how in enumerate(routings)))

    with_client(url, use)


def test_a_request_stays_on_its_data_parallel_rank(server: ScriptedServer) -> None:
    ask_with(server.url, Routing(data_parallel_rank=3), Routing())
    ranks = [headers.get("X-data-parallel-rank") for headers in server.headers]
    assert sorted(ranks, key=str) == ["3", None]


def test_priority_and_kv_transfer_params_pass_through(server: ScriptedServer) -> None:
    params = {"do_remote_decode": True, "remote_engine_id": "a"}
    ask_with(server.url, Routing(priority=-2, kv_transfer_params=params))
    ((_, _, body),) = server.requests
    assert body["priority"] == -2
    assert body["kv_transfer_params"] == params


def test_kv_transfer_params_of_an_answer_are_kept(server: ScriptedServer) -> None:
    server.answer = lambda method, path, body: (200, respond(body, kv_transfer_params={"remote_port": 5}))
    (answer,) = generate(server.url, (PROMPT, sampling()))
    assert answer.kv_transfer_params == {"remote_port": 5}


def test_requests_that_go_elsewhere_are_not_joined(server: ScriptedServer) -> None:
    ask_with(server.url, Routing(data_parallel_rank=0), Routing(data_parallel_rank=1), Routing(priority=1))
    assert len(server.requests) == 3


def test_caches_are_salted_with_the_weights(server: ScriptedServer) -> None:
    async def use(client: InferenceClient) -> None:
        await client.generate(PROMPT, sampling())
        client.policy_version = 4
        await client.generate(PROMPT, sampling())

    with_client(server.url, use)
    assert [body.get("cache_salt") for _, _, body in server.requests] == [None, "step-4"]


def test_a_server_without_its_flag_is_told_which(server: ScriptedServer) -> None:
    server.answer = lambda method, path, body: (403, {"detail": "Scale-out endpoints are disabled."})
    with pytest.raises(InferenceError, match=r"HTTP 403: Scale-out endpoints are disabled. Start vLLM with --enable-"):
        generate(server.url, (PROMPT, sampling()))


@pytest.mark.parametrize(("status", "tries"), [(400, 1), (422, 1), (500, 3), (503, 3)])
def test_a_refused_request_carries_the_servers_words(server: ScriptedServer, status: int, tries: int) -> None:
    server.answer = lambda method, path, body: (status, {"error": {"message": "no such token"}})
    with pytest.raises(InferenceError, match=rf"answered HTTP {status}: no such token$"):
        generate(server.url, (PROMPT, sampling()))
    assert len(server.requests) == tries


def test_a_server_error_that_passes_is_tried_again_with_the_same_seed(server: ScriptedServer) -> None:
    statuses = iter([500, 503])

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        status = next(statuses, 200)
        return status, respond(body) if status == 200 else {"error": "not now"}

    server.answer = answer

    async def use(client: InferenceClient) -> tuple[Generation, int]:
        return await client.generate(PROMPT, sampling(5)), client.num_retries

    generation, num_retries = with_client(server.url, use)
    assert generation.token_ids == [30, 7]
    assert num_retries == 2
    assert [body["sampling_params"]["seed"] for _, _, body in server.requests] == [5, 5, 5]


def test_an_answer_that_was_given_up_is_refused() -> None:
    def abort(method: str, path: str, body: Any) -> tuple[int, Any]:
        answer = respond(body)
        answer["choices"][0]["finish_reason"] = "abort"
        return 200, answer

    with scripted_server(abort) as server, pytest.raises(InferenceError, match="finish_reason is 'abort', wanted stop"):
        with_client(server.url, lambda client: client.generate(PROMPT, sampling()))


def test_a_placeholder_that_the_server_left_without_a_picture_is_refused(server: ScriptedServer) -> None:
    server.answer = lambda method, path, body: (200, respond(body, mm_placeholders=None))
    prompt = Prompt(token_ids=(5, IMAGE_ID, 6))
    with pytest.raises(PlaceholderMismatch, match="2 picture tokens, but the ranges of its 0 pictures cover 0"):
        generate(server.url, (prompt, sampling()))


def unlabelled(body: dict[str, Any]) -> dict[str, Any]:
    answer = respond(body)
    del answer["choices"][0]["weight_versions"]
    return answer


def test_an_answer_without_a_version_has_that_of_the_time_it_was_asked_for(server: ScriptedServer) -> None:
    asked = threading.Event()

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        asked.set()
        time.sleep(0.1)
        return 200, unlabelled(body)

    server.answer = answer

    async def use(client: InferenceClient) -> Generation:
        client.policy_version = 4
        flying = asyncio.create_task(client.generate(PROMPT, sampling()))
        await asyncio.to_thread(asked.wait)
        client.policy_version = 5
        return await flying

    assert with_client(server.url, use).policy_version == 4


@pytest.mark.parametrize("label", ["default", "other-run-3"])
def test_a_server_that_was_started_anew_is_found_out(server: ScriptedServer, label: str) -> None:
    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        changed = respond(body)
        changed["choices"][0]["weight_versions"] = [{"version": label, "start": 0, "end": 2}]
        return 200, changed

    server.answer = answer

    async def use(client: InferenceClient) -> Generation:
        client.policy_version = 4
        return await client.generate(PROMPT, sampling())

    with pytest.raises(InferenceError, match=rf"sampled from weights {label}, which this run never gave .*step-4"):
        with_client(server.url, use)


def test_an_answer_without_tokens_is_refused(server: ScriptedServer) -> None:
    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        empty = respond(body)
        empty["choices"][0] |= {"token_ids": [], "logprobs": {"content": []}}
        return 200, empty

    server.answer = answer
    with pytest.raises(InferenceError, match="no token was sampled"):
        generate(server.url, (PROMPT, sampling()))
