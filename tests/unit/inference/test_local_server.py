"""The local server over HTTP: a real uvicorn around a real engine, both in this process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import socket
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
import uvicorn
from safetensors.torch import load_file, save_file

from latepix.inference.contract import GenerateRequest, GenerateResponse
from latepix.inference.local_engine import BadRequest, Completion, LocalEngine, PreparedPrompt
from latepix.inference.local_server import EngineThread, build_app
from latepix.processes import bind
from latepix.trace.ingress import ImageLimits
from tests.tiny.pictures import make_image
from tests.tiny.policy import make_request, sharpen

MAX_BATCH_SIZE = 64
SMALL, LARGE = make_image(seed=1), make_image(width=96, height=64, seed=2)
GENERATE = "/inference/v1/generate"


class CountingEngine(LocalEngine):
    """The engine with a tally of the prompts of each batch, and of those that were prefilled."""

    def __init__(self, model_path: Path, **settings: Any) -> None:
        super().__init__(model_path, **settings)
        self.batches: list[int] = []
        self.prefilled: list[int] = []

    def generate(self, prompts: Sequence[PreparedPrompt]) -> list[list[Completion]]:
        self.batches.append(len(prompts))
        return super().generate(prompts)

    def _prefill(self, prompts: Sequence[PreparedPrompt]) -> Any:
        self.prefilled.append(len(prompts))
        return super()._prefill(prompts)


class Server(msgspec.Struct, frozen=True):
    engine: CountingEngine
    url: str
    http: httpx.Client

    def generate(self, request: GenerateRequest) -> GenerateResponse:
        answer = self.http.post(GENERATE, content=msgspec.json.encode(request))
        assert answer.status_code == 200, answer.text
        return msgspec.json.decode(answer.content, type=GenerateResponse)

    def refusal(self, body: Any, *, route: str = GENERATE) -> str:
        """Send something wrong and return what the server says to it."""
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        answer = self.http.post(route, content=content)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, 400), answer.text
        return error["message"]

    def update(self, path: Path, version: str) -> None:
        for route, body in (
            ("/pause?mode=keep", None),
            ("/start_weight_update", None),
            ("/update_weights", {"update_info": {"path": str(path)}}),
            ("/finish_weight_update", {"weight_version": version}),
            ("/resume", None),
        ):
            assert self.http.post(route, json=body).status_code == 200, route

    @property
    def weight_version(self) -> str:
        return self.http.get("/weight_info").json()["weight_version"]


@contextlib.contextmanager
def serving(model: Path, *, batch_window_s: float = 0.02) -> Generator[Server]:
    engine = CountingEngine(model, max_model_len=128)
    thread = EngineThread(engine, max_batch_size=MAX_BATCH_SIZE, batch_window_s=batch_window_s)
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(build_app(thread), log_level="critical", access_log=False))
    runner = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="uvicorn")
    runner.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    limits = httpx.Limits(max_connections=100)
    try:
        with httpx.Client(base_url=url, timeout=30, limits=limits) as http:
            yield Server(engine=engine, url=url, http=http)
    finally:
        server.should_exit = True
        runner.join()
        thread.stop()
        sock.close()


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpen(tiny_model, tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model) as server:
        yield server


@pytest.fixture
def fresh(model: Path) -> Iterator[Server]:
    """Return a server whose weights a test may change."""
    with serving(model) as server:
        yield server


def request_of(server: Server, *parts: Any, **sampling: Any) -> GenerateRequest:
    return make_request(server.engine.info, *parts, **({"max_tokens": 4, "sampling_seed": 1} | sampling))


def body_of(server: Server, *parts: Any, **sampling: Any) -> dict[str, Any]:
    """Return a request as JSON data, ready to be spoiled; parts default to one picture in text."""
    return msgspec.to_builtins(request_of(server, *(parts or (2, SMALL, 3)), **sampling))


def test_the_answer_holds_the_expanded_prompt_and_its_ranges(server: Server) -> None:
    info = server.engine.info
    request = request_of(server, 2, LARGE, 3, SMALL, 1, n=2, stop_token_ids=list(info.stop_ids))
    response = server.generate(request)
    placeholder = info.image_placeholder_id
    first, text, second = request.token_ids[:2], request.token_ids[3:6], request.token_ids[7:]
    assert response.prompt_token_ids == [*first, *[placeholder] * 6, *text, placeholder, *second]
    assert response.mm_placeholders is not None
    assert [(p.offset, p.length) for p in response.mm_placeholders["image"]] == [(2, 6), (11, 1)]
    assert [choice.index for choice in response.choices] == [0, 1]
    for choice in response.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [entry.id for entry in choice.logprobs.content] == choice.token_ids
        assert all(entry.logprob < 0 for entry in choice.logprobs.content)
        assert choice.finish_reason in ("stop", "length")
        assert choice.weight_versions is not None
        assert [(v.version, v.start, v.end) for v in choice.weight_versions] == [("step-0", 0, len(choice.token_ids))]
    assert response.usage is not None
    assert response.usage.prompt_tokens == 13
    assert response.usage.completion_tokens == sum(len(choice.token_ids) for choice in response.choices)


def test_a_text_only_prompt_has_no_ranges(server: Server) -> None:
    response = server.generate(request_of(server, 5))
    assert response.mm_placeholders is None
    assert response.prompt_token_ids == request_of(server, 5).token_ids


def test_health_and_models(server: Server) -> None:
    health = server.http.get("/health").json()
    assert health["status"] == "ok"
    assert health["peak_rss_bytes"] > 1_000_000
    (card,) = server.http.get("/v1/models").json()["data"]
    assert (card["object"], card["max_model_len"]) == ("model", 128)
    assert server.http.get("/no/such/route").status_code == 404
    assert server.http.get(GENERATE).status_code == 405


def set_token(body: dict[str, Any], token: Any) -> None:
    body["token_ids"][0] = token


def set_sampling(name: str, value: Any) -> Any:
    return lambda body: body["sampling_params"].update({name: value})


def set_url(url: Any) -> Any:
    return lambda body: body["content_parts"][0].update(url=url)


def nest_url(body: dict[str, Any]) -> None:
    part = body["content_parts"][0]
    part["image_url"] = {"url": part.pop("url")}


# Prompt of `body_of`: two text ids, a placeholder, three text ids; the tiny vocabulary has 384 ids.
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(lambda b: b["content_parts"].clear(), "1 media placeholders, content_parts has 0", id="no part"),
        pytest.param(
            lambda b: b["content_parts"].extend(b["content_parts"]),
            "1 media placeholders, content_parts has 2",
            id="parts",
        ),
        pytest.param(
            lambda b: b["token_ids"].insert(2, b["token_ids"][2]),
            "2 media placeholders, content_parts has 1",
            id="expanded",
        ),
        pytest.param(lambda b: b.update(token_ids=[]), "0 media placeholders", id="empty with a picture"),
        pytest.param(lambda b: b.update(token_ids=[], content_parts=[]), "token_ids must be non-empty", id="empty"),
        pytest.param(lambda b: set_token(b, -1), r"lie in \[0, 384\)", id="negative id"),
        pytest.param(lambda b: set_token(b, 384), r"lie in \[0, 384\)", id="id outside the vocabulary"),
        pytest.param(lambda b: set_token(b, 1.5), "not a generate request", id="fractional id"),
        pytest.param(lambda b: b.pop("sampling_params"), "sampling_params", id="no sampling params"),
        pytest.param(set_url("data:image/png;base64,!!!"), r"content_parts\[0\]: .*strict base64", id="bad base64"),
        pytest.param(set_url("data:image/png;base64,aGVsbG8="), r"content_parts\[0\]: .*not a picture", id="no image"),
        pytest.param(set_url("https://example.com/a.png"), r"content_parts\[0\]: .*data URL", id="a web address"),
        pytest.param(set_url(None), r"content_parts\[0\] must be .*url", id="no url"),
        pytest.param(nest_url, "nested in image_url, .* vLLM would not see the picture", id="a chat message's part"),
        pytest.param(
            lambda b: b["content_parts"][0].update(type="video_url"), r"\[0\] must be .*image_url", id="video"
        ),
        pytest.param(set_sampling("max_tokens", 1000), "max_tokens is 1000.*must fit into 128", id="too many tokens"),
        pytest.param(set_sampling("max_tokens", 0), "max_tokens is 0; it must be at least 1", id="no tokens"),
        pytest.param(set_sampling("top_p", 0.9), "top_p must be 1", id="top_p"),
        pytest.param(set_sampling("top_k", 5), "top_k 0", id="top_k"),
        pytest.param(set_sampling("logprobs", 5), "logprobs at most 1", id="many logprobs"),
        pytest.param(set_sampling("n", 0), "n must be at least 1", id="no answers"),
        pytest.param(set_sampling("n", 10**9), "at most 64 sequences together.*max_batch_size", id="a billion answers"),
        pytest.param(set_sampling("seed", -1), "seed at least 0, got 1 and -1", id="negative seed"),
        pytest.param(set_sampling("temperature", -1), r"temperature must be 0 .*got -1", id="negative temperature"),
        pytest.param(set_sampling("temperature", 1e-30), "temperature must be 0", id="temperature that overflows"),
        pytest.param(set_sampling("temperature", 1e6), "temperature must be 0", id="too hot"),
        pytest.param(set_sampling("temperature", "warm"), "not a generate request", id="temperature in words"),
        pytest.param(set_sampling("logit_bias", {"7": 5.0}), "bans only", id="a bias that is no ban"),
        pytest.param(set_sampling("logit_bias", {"dog": -100}), "'dog' is not a token id", id="a bias for a word"),
        pytest.param(set_sampling("logit_bias", {"384": -100}), r"'384' is not .*\[0, 384\)", id="a bias outside"),
        pytest.param(set_sampling("logit_bias", {"-1": -100}), "'-1' is not a token id", id="a bias below"),
        pytest.param(set_sampling("logit_bias", {"9" * 5000: -100}), "is not a token id", id="a bias far outside"),
        pytest.param(
            set_sampling("logit_bias", {str(i): -100 for i in range(384)}), "bans every token", id="everything banned"
        ),
    ],
)
def test_a_wrong_request_is_http_400_that_says_what_is_wrong(server: Server, spoil: Any, message: str) -> None:
    body = body_of(server)
    spoil(body)
    refusal = server.refusal(body)
    assert re.search(message, refusal), refusal


def test_a_video_placeholder_is_refused(server: Server) -> None:
    body = body_of(server)
    (video,) = set(server.engine.info.placeholder_ids) - {server.engine.info.image_placeholder_id}
    body["token_ids"][2] = video
    assert "another medium" in server.refusal(body)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'"text"', b"null"])
def test_a_body_that_is_no_request_is_refused(server: Server, body: bytes) -> None:
    assert "not a generate request" in server.refusal(body)


def test_a_wrong_request_does_not_spoil_its_batch(server: Server) -> None:
    good, bad = body_of(server), body_of(server)
    bad["sampling_params"]["logit_bias"] = {"dog": -100}
    wanted = server.generate(request_of(server, 2, SMALL, 3)).choices[0].token_ids
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda body: server.http.post(GENERATE, json=body), [good, bad, good, bad]))
    assert [answer.status_code for answer in answers] == [200, 400, 200, 400]
    assert answers[0].json()["choices"][0]["token_ids"] == wanted


def test_many_requests_at_once_get_the_answers_they_get_alone(server: Server) -> None:
    requests = [
        request_of(server, 1 + index % 5, *((SMALL,) if index % 2 else ()), 2, sampling_seed=index, seed=index % 7)
        for index in range(64)
    ]
    before = len(server.engine.batches)
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        together = list(pool.map(server.generate, requests))
    assert len(server.engine.batches) - before < 64
    for request, response in list(zip(requests, together, strict=True))[::8]:
        assert server.generate(request).choices[0].token_ids == response.choices[0].token_ids


def test_equal_prompts_that_arrive_together_are_prefilled_once(model: Path) -> None:
    with serving(model, batch_window_s=0.5) as server:
        requests = [request_of(server, 3, SMALL, 2, sampling_seed=seed, n=2) for seed in range(6)]
        requests += [request_of(server, 3, LARGE, 2)] * 2
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            responses = list(pool.map(server.generate, requests))
        assert server.engine.batches == [8]
        assert server.engine.prefilled == [2]
        # Seeds 0 to 6; two of them may agree on so few tokens.
        assert len({tuple(choice.token_ids) for r in responses[:6] for choice in r.choices}) > 4


def test_a_batch_holds_no_more_sequences_than_allowed(model: Path) -> None:
    with serving(model, batch_window_s=0.5) as server:
        requests = [request_of(server, 2, seed=seed, n=30) for seed in range(5)]
        with concurrent.futures.ThreadPoolExecutor(5) as pool:
            list(pool.map(server.generate, requests))
        assert server.engine.batches == [2, 2, 1]


def other_weights(model: Path, out: Path) -> Path:
    out.mkdir()
    tensors = {name: tensor * 1.2 for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, out / "model.safetensors")
    return out


def first_logprobs(response: GenerateResponse) -> list[float]:
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    return [entry.logprob for entry in logprobs.content]


def test_a_weight_update_changes_the_logprobs_and_the_version(fresh: Server, model: Path, tmp_path: Path) -> None:
    request = request_of(fresh, 2, SMALL, 3)
    before = fresh.generate(request)
    assert fresh.weight_version == "step-0"
    assert fresh.http.post("/init_weight_transfer_engine", json={"init_info": {}}).status_code == 200
    weights = other_weights(model, tmp_path / "weights")
    fresh.update(weights, "step-7")
    assert fresh.weight_version == "step-7"
    after = fresh.generate(request)
    assert after.choices[0].weight_versions is not None
    assert after.choices[0].weight_versions[0].version == "step-7"
    # The new model's, as an engine that started from it has them.
    reference = LocalEngine(model, max_model_len=128)
    reference.load_weights(load_file(weights / "model.safetensors"))
    ((wanted,),) = reference.generate([reference.prepare(request)])
    assert after.choices[0].token_ids == wanted.token_ids
    assert first_logprobs(after) == pytest.approx(wanted.logprobs, abs=1e-5)
    assert first_logprobs(after) != pytest.approx(first_logprobs(before), abs=1e-2)


def drop_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop("model.language_model.norm.weight")


def reshape_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.language_model.norm.weight"] = torch.zeros(3)


def test_a_failing_update_is_http_400_and_leaves_the_old_weights(server: Server, model: Path, tmp_path: Path) -> None:
    request = request_of(server, 2, SMALL, 3)
    before = first_logprobs(server.generate(request))
    truncated = other_weights(model, tmp_path / "truncated") / "model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-1000])
    (tmp_path / "empty").mkdir()
    for folder, message in (
        (tmp_path / "missing", "missing has no *.safetensors file"),
        (tmp_path / "empty", "empty has no *.safetensors file"),
        (truncated.parent, "cannot be read as safetensors"),
    ):
        assert server.http.post("/start_weight_update").status_code == 200
        refusal = server.refusal({"update_info": {"path": str(folder)}}, route="/update_weights")
        assert message in refusal
        assert "No weights were staged" in server.refusal({"weight_version": "step-9"}, route="/finish_weight_update")
    for spoil, message in ((drop_one, "missing ['model.language_model.norm.weight']"), (reshape_one, "other shape")):
        folder = other_weights(model, tmp_path / spoil.__name__)
        tensors = load_file(folder / "model.safetensors")
        spoil(tensors)
        save_file(tensors, folder / "model.safetensors")
        assert server.http.post("/start_weight_update").status_code == 200
        staged = server.http.post("/update_weights", json={"update_info": {"path": str(folder)}})
        assert staged.status_code == 200
        assert message in server.refusal({"weight_version": "step-9"}, route="/finish_weight_update")
    assert server.weight_version == "step-0"
    assert first_logprobs(server.generate(request)) == before


@pytest.mark.parametrize("body", [{}, {"update_info": None}, {"update_info": []}, {"update_info": {"path": 3}}, [], 3])
def test_an_update_without_a_path_is_refused(server: Server, body: Any) -> None:
    assert server.http.post("/start_weight_update").status_code == 200
    assert "must be" in server.refusal(body, route="/update_weights")


def test_an_update_out_of_order_is_refused(fresh: Server, model: Path) -> None:
    assert "call /start_weight_update first" in fresh.refusal(
        {"update_info": {"path": str(model)}}, route="/update_weights"
    )
    assert "No weights were staged" in fresh.refusal({}, route="/finish_weight_update")
    assert fresh.http.post("/start_weight_update").status_code == 200
    assert fresh.http.post("/update_weights", json={"update_info": {"path": str(model)}}).status_code == 200
    assert "must be text" in fresh.refusal({"weight_version": 7}, route="/finish_weight_update")


def test_requests_wait_during_a_pause_and_are_answered_by_the_new_weights(
    fresh: Server, model: Path, tmp_path: Path
) -> None:
    weights = other_weights(model, tmp_path / "weights")
    request = request_of(fresh, 2, SMALL, 3)
    assert fresh.http.post("/pause").status_code == 200
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(fresh.generate, request) for _ in range(4)]
        done, _ = concurrent.futures.wait(waiting, timeout=0.3)
        assert not done
        assert fresh.http.get("/health").status_code == 200
        fresh.update(weights, "step-1")
        responses = [future.result(timeout=20) for future in waiting]
    for response in responses:
        assert response.choices[0].weight_versions is not None
        assert [span.version for span in response.choices[0].weight_versions] == ["step-1"]
    # Four sequences together are rounded differently from one.
    assert first_logprobs(responses[0]) == pytest.approx(first_logprobs(fresh.generate(request)), abs=2e-5)


def test_a_client_that_goes_away_does_not_end_the_engine(server: Server) -> None:
    content = msgspec.json.encode(request_of(server, 3, SMALL, 2, max_tokens=80, n=8))
    head = f"POST {GENERATE} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    for sent in (head, head + content[:100], head + content):
        with socket.create_connection(address) as connection:
            connection.sendall(sent)
            time.sleep(0.03)
    assert server.generate(request_of(server, 2, SMALL, 3)).choices


class SlowEngine(CountingEngine):
    """An engine whose preparation lasts until it is told to go on, and then fails."""

    def __init__(self, model_path: Path) -> None:
        super().__init__(model_path)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def prepare(self, request: GenerateRequest) -> PreparedPrompt:
        if not self.go_on.is_set():
            self.entered.set()
            self.go_on.wait(20)
            raise ValueError("too late")
        return super().prepare(request)


def test_a_request_that_is_given_up_while_it_fails_does_not_end_the_engine(model: Path) -> None:
    engine = SlowEngine(model)
    thread = EngineThread(engine, max_batch_size=MAX_BATCH_SIZE, batch_window_s=0.0)
    try:
        request = make_request(engine.info, 3, max_tokens=2)
        given_up = thread.submit(request)
        assert engine.entered.wait(20)
        assert given_up.cancel()
        engine.go_on.set()
        assert thread.submit(request).result(timeout=20).choices
    finally:
        thread.stop()


def test_the_engine_takes_pictures_up_to_the_limits_of_the_run(tiny_model: Path) -> None:
    engine = LocalEngine(tiny_model, limits=ImageLimits(max_bytes=100))
    with pytest.raises(BadRequest, match=r"content_parts\[0\]: The picture has .* the limit is 100"):
        engine.prepare(make_request(engine.info, SMALL))
