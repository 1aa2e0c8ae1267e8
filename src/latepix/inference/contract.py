"""`POST /inference/v1/generate` and the weight-update routes: the JSON both servers speak.

The names are vLLM's (0.30 and newer). The client decodes leniently (servers add fields), the local server strictly
where a wrong value would change what is sampled.
"""

from __future__ import annotations

from typing import Any

import msgspec

#: Prefix of the weight version label; the number is the policy version.
VERSION_PREFIX = "step-"
#: Largest request body that the local server takes, bytes: pictures of a long conversation in base64.
MAX_BODY_BYTES = 512_000_000


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a request's tokens are drawn.

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token.
        max_tokens: new tokens; None means up to the model's length.
        n: answers to one prompt; answer i uses `seed + i`.
        seed: makes the request's draws repeatable.
        stop_token_ids: ids that end an answer; the id is part of it.
        logit_bias: token id (as text) -> bias; the local engine takes bans only (-100 or lower).
        logprobs: must be 0 or None: the sampled token's logprob is always returned.
        top_p, top_k: must stay at "off": the trainer computes the untruncated distribution.
        detokenize: ignored; there is no text in the answer.
    """

    temperature: float = 1.0
    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    stop_token_ids: list[int] = []
    logit_bias: dict[str, float] = {}
    logprobs: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    detokenize: bool = True


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A logical prompt: one placeholder per picture, pictures in prompt order.

    Attributes:
        token_ids: unexpanded prompt.
        content_parts: `{"type": "image_url", "url": "data:..."}`, one per placeholder. (A chat message nests the URL
            one level deeper; vLLM takes such a part here for no picture at all, so we never send it.)
        sampling_params: how to draw.
        return_token_ids: ask for the expanded prompt and the ranges; the local server always returns them.
        cache_salt: separates prefix caches of different weights.
        model: must be None or the served name.
        priority: lower is earlier; vLLM takes others than 0 only with `--scheduling-policy priority`.
        kv_transfer_params: of disaggregated serving, as the server's connector wants them.
        request_id: for the server's log.

    The local server ignores `model`, `priority`, `kv_transfer_params` and `request_id`.
    """

    token_ids: list[int]
    sampling_params: SamplingParams
    content_parts: list[dict[str, Any]] = []
    return_token_ids: bool = False
    model: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    request_id: str | None = None


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """Logprob of one sampled token. vLLM 0.32 writes `token_id`, earlier ones `token: "token_id:N"`."""

    logprob: float
    token_id: int | None = None
    token: str | None = None

    @property
    def id(self) -> int | None:
        """The token id in either spelling; None if there is neither."""
        if self.token_id is not None:
            return self.token_id
        prefix, _, number = (self.token or "").partition(":")
        return int(number) if prefix == "token_id" and number.isdigit() else None


class Logprobs(msgspec.Struct, frozen=True):
    """One entry per sampled token."""

    content: list[TokenLogprob] | None = None


class WeightVersionSpan(msgspec.Struct, frozen=True):
    """Tokens [start, end) of an answer were sampled by weights `version`."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    token_ids: list[int]
    logprobs: Logprobs | None = None
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    weight_versions: list[WeightVersionSpan] | None = None


class Placed(msgspec.Struct, frozen=True):
    """A placeholder range of the expanded prompt."""

    offset: int
    length: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class GenerateResponse(msgspec.Struct, frozen=True):
    """The server's answer; the expanded prompt and its ranges are the only authority on pictures."""

    request_id: str
    choices: list[Choice]
    model: str | None = None
    created: int | None = None
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[Placed]] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ProcessedPixels(msgspec.Struct, frozen=True):
    """A picture as it enters the server's vision tower.

    Attributes:
        grid_thw: patches along time, height and width.
        shape: [rows, dim] of `data`.
        dtype: always `float32`.
        data: base64 of little-endian float32, normalized.
    """

    grid_thw: list[int]
    shape: list[int]
    dtype: str
    data: str


class PixelsResponse(msgspec.Struct, frozen=True):
    """Answer of `POST /latepix/pixels`: what the server's own pipeline makes of a prompt, without sampling."""

    prompt_token_ids: list[int]
    mm_placeholders: dict[str, list[Placed]]
    images: list[ProcessedPixels]


def image_part(url: str) -> dict[str, Any]:
    """Return the `content_parts` entry of one picture."""
    return {"type": "image_url", "url": url}


def version_label(policy_version: int) -> str:
    """Return the label of a policy version, `step-3`."""
    return f"{VERSION_PREFIX}{policy_version}"


def policy_version_of(label: str) -> int | None:
    """Return the policy version of a label, None if it is not one of ours."""
    number = label.removeprefix(VERSION_PREFIX)
    return int(number) if label.startswith(VERSION_PREFIX) and number.isdigit() else None
