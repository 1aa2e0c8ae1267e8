"""`prompt_token_ids` and `mm_placeholders` in the answers of vLLM 0.28 and 0.29, which lack them.

Newer versions have both; which is the case is read off the answer's own fields. Upstream's code runs as it is: a
subclass looks at the input that it hands to the engine, and adds to the answer that it returns.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from latepix_vllm import compat

#: The fields that clients need: the expanded prompt, and where each picture lies in it.
FIELDS = ("prompt_token_ids", "mm_placeholders")


def install() -> None:
    """Let vLLM make its token server of the subclass, where its answers lack the fields."""
    response = compat.token_response()
    if set(FIELDS) <= response.model_fields.keys():
        return
    module = compat.token_server_module()
    # vLLM looks the class up in this module when it starts the API server, which is after plugins have been attached.
    module.ServingTokens = with_fields(module.ServingTokens, response)


def with_fields(server: Any, response: Any) -> Any:
    """Return a subclass of a token server whose whole answers have the two fields.

    Args:
        server: vLLM's `ServingTokens`.
        response: vLLM's model of a whole answer.
    """
    answer = type(
        response.__name__,
        (response,),
        {
            "__module__": __name__,
            "__doc__": "vLLM's answer and the expanded prompt.",
            "__annotations__": {
                "prompt_token_ids": list[int] | None,
                "mm_placeholders": dict[str, list[dict[str, int]]] | None,
            },
            "prompt_token_ids": None,
            "mm_placeholders": None,
        },
    )
    seen: ContextVar[Any] = ContextVar("latepix_engine_input", default=None)

    class TokenServer(server):
        """vLLM's token server; tells what it gave to the engine."""

        def _log_inputs(self, request_id: str, inputs: Any, *args: Any, **kwargs: Any) -> None:
            # The one call that upstream makes with the engine's input on its way; requests are told apart by context.
            seen.set(inputs)
            super()._log_inputs(request_id, inputs, *args, **kwargs)

        async def serve_tokens(self, *args: Any, **kwargs: Any) -> Any:
            """Answer a request as upstream does, with the expanded prompt and its ranges."""
            seen.set(None)
            result = await super().serve_tokens(*args, **kwargs)
            if not isinstance(result, response):
                return result
            engine_input = seen.get()
            if engine_input is None:
                raise RuntimeError(
                    "This vLLM's token server no longer passes the engine's input through _log_inputs, so the expanded "
                    "prompt is unknown. Use vLLM 0.30 or newer, whose answers contain it."
                )
            return answer(
                **{name: getattr(result, name) for name in type(result).model_fields},
                prompt_token_ids=list(engine_input["prompt_token_ids"]),
                mm_placeholders=placeholder_ranges(engine_input),
            )

    TokenServer.__name__ = TokenServer.__qualname__ = server.__name__
    return TokenServer


def placeholder_ranges(engine_input: Any) -> dict[str, list[dict[str, int]]] | None:
    """Return the placeholder ranges of an engine input by modality; None if it has no pictures."""
    if engine_input.get("type") != "multimodal":
        return None
    return {
        modality: [{"offset": place.offset, "length": place.length} for place in places]
        for modality, places in engine_input["mm_placeholders"].items()
    }
