"""vLLM 0.28 and 0.29 answer without the expanded prompt; the subclass adds it. Their token server is stood in for."""

from __future__ import annotations

import asyncio
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from latepix_vllm import compat, token_server


class OldResponse(BaseModel):
    request_id: str
    choices: list[int] = []


class NewResponse(OldResponse):
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, Any] | None = None


class OldServer:
    """Expands the prompt, tells the log, waits for the engine and answers, like upstream."""

    def __init__(self) -> None:
        self.logged: list[str] = []

    async def serve_tokens(self, request: dict[str, Any], raw_request: Any = None) -> Any:
        if request.get("error"):
            return SimpleNamespace(error=request["error"])
        await asyncio.sleep(0)
        self._log_inputs(request["id"], expand(request["token_ids"]), params=None, lora_request=None)
        # Later requests are answered first.
        await asyncio.sleep(0.002 * (10 - len(request["token_ids"])))
        return OldResponse(request_id=request["id"], choices=[len(request["token_ids"])])

    def _log_inputs(self, request_id: str, inputs: Any, params: Any, lora_request: Any) -> None:
        self.logged.append(request_id)


class SilentServer(OldServer):
    """No longer passes its input through the log."""

    async def serve_tokens(self, request: dict[str, Any], raw_request: Any = None) -> Any:
        return OldResponse(request_id=request["id"])


def expand(token_ids: list[int]) -> dict[str, Any]:
    """Return an engine input in which every 7 became three."""
    if 7 not in token_ids:
        return {"type": "token", "prompt_token_ids": token_ids}
    expanded: list[int] = []
    places = []
    for token in token_ids:
        if token == 7:
            places.append(SimpleNamespace(offset=len(expanded), length=3, is_embed=None))
        expanded += [token] * (3 if token == 7 else 1)
    return {"type": "multimodal", "prompt_token_ids": expanded, "mm_placeholders": {"image": places}}


def serve(server: Any, *requests: dict[str, Any]) -> list[Any]:
    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(asyncio.create_task(server.serve_tokens(request)) for request in requests))

    return asyncio.run(all_at_once())


def test_the_answer_has_the_expanded_prompt_and_its_ranges() -> None:
    server = token_server.with_fields(OldServer, OldResponse)()
    (answer,) = serve(server, {"id": "a", "token_ids": [1, 7, 2, 7]})
    # The API's route asks whether it is an answer, and dumps it.
    assert isinstance(answer, OldResponse)
    assert answer.model_dump() == {
        "request_id": "a",
        "choices": [4],
        "prompt_token_ids": [1, 7, 7, 7, 2, 7, 7, 7],
        "mm_placeholders": {"image": [{"offset": 1, "length": 3}, {"offset": 5, "length": 3}]},
    }
    assert server.logged == ["a"]


def test_text_has_no_ranges() -> None:
    (answer,) = serve(token_server.with_fields(OldServer, OldResponse)(), {"id": "a", "token_ids": [1, 2]})
    assert answer.prompt_token_ids == [1, 2]
    assert answer.mm_placeholders is None


def test_requests_at_the_same_time_keep_their_own_prompts() -> None:
    requests = [{"id": str(index), "token_ids": [*range(20, 20 + index), 7]} for index in range(1, 9)]
    answers = serve(token_server.with_fields(OldServer, OldResponse)(), *requests)
    assert [answer.prompt_token_ids for answer in answers] == [[*r["token_ids"], 7, 7] for r in requests]
    assert [answer.mm_placeholders["image"][0]["offset"] for answer in answers] == list(range(1, 9))


def test_errors_pass_unchanged() -> None:
    (answer,) = serve(token_server.with_fields(OldServer, OldResponse)(), {"error": "no such model"})
    assert answer.error == "no such model"


def test_a_server_that_hides_its_input_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"no longer passes the engine's input.*Use vLLM 0\.30"):
        serve(token_server.with_fields(SilentServer, OldResponse)(), {"id": "a", "token_ids": [1]})


@pytest.mark.parametrize(("response", "is_replaced"), [(OldResponse, True), (NewResponse, False)])
def test_it_is_installed_only_where_the_fields_are_missing(
    monkeypatch: pytest.MonkeyPatch, response: type[BaseModel], is_replaced: bool
) -> None:
    module: Any = ModuleType("serving")
    module.ServingTokens = OldServer
    monkeypatch.setattr(compat, "token_response", lambda: response)
    monkeypatch.setattr(compat, "token_server_module", lambda: module)
    token_server.install()
    assert (module.ServingTokens is not OldServer) == is_replaced
    assert issubclass(module.ServingTokens, OldServer)
