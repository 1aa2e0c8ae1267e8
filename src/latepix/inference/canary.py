"""The canary: a few fixed prompts whose next-token distribution both sides compute after every publish.

A server may say that it loaded new weights and go on serving others (a reload that did nothing, a stale cache, a
layout it read wrongly). So the trainer publishes, with every version, the log-probabilities [K, V] of the next token
of K fixed prompts, with and without pictures; the server is asked for a few tokens of the same prompts, as in a
rollout, and its logprobs are held against the published ones. The prompts are the same every time: a cache that was
not emptied shows.

What is decided from the logprobs of the sampled tokens (`judge`):

* too far from the version it should be: refused;
* closer to the version it served before than to the new one: the update did nothing;
* as close to both, since the step was smaller than the rounding: no decision, and the older version stays the one to
  compare with, so that a server that stands still is found out a few steps later.
"""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
from PIL import Image

from latepix.errors import InferenceError, StaleWeights
from latepix.families.model_info import ModelInfo
from latepix.inference.client import ANYWHERE, Generation, InferenceClient, Prompt, Routing, Sampling
from latepix.inference.contract import version_label
from latepix.inference.render import MessageRenderer
from latepix.trace.ingress import InlineImage, ingest_image
from latepix.trace.messages import assistant_message, iter_images, user_message

#: Tokens sampled for each prompt.
_NUM_SAMPLES = 8
#: Largest mean mismatch KL in nats, by dtype: what rounding explains (measured: 5e-9 and 2e-3), with room.
MAX_KL = {"float32": 1e-6, "bfloat16": 0.015}
#: A version explains the logprobs better if its mean error is below this share of the other's.
_CLEARLY_LESS = 0.5
#: Mean |log-probability difference| between two versions that no rounding explains, nats.
_SMALLEST_CHANGE = 1e-5


class Reading(msgspec.Struct, frozen=True):
    """What the server sampled.

    Attributes:
        rows: [N] int64, which prompt.
        token_ids: [N] int64.
        logprobs: [N] float64, nats, by the server.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray


class Verdict(msgspec.Struct, frozen=True):
    """What a reading says about the weights that are served.

    Attributes:
        kl: mean mismatch KL against the version that should be served, nats.
        is_clear: the version before fits clearly worse, so this one can be told from it.
    """

    kl: float
    is_clear: bool


def canary_prompts(renderer: MessageRenderer, *, max_images: int | None = None) -> tuple[Prompt, ...]:
    """Build the K prompts: text alone, one picture, two pictures, and a second turn after a picture.

    Args:
        renderer: of the model.
        max_images: pictures that the server takes in one prompt; prompts with more are left out. None: any number.
    """
    one, two = (_picture(renderer.info, seed) for seed in (0, 1))
    conversations = (
        [user_message("Say a number.")],
        [user_message(one, "What is this?")],
        [user_message(one, "and", two, "Which one?")],
        [user_message(two, "What is this?"), assistant_message("A picture."), user_message("Which colour?")],
    )
    return tuple(
        Prompt(
            token_ids=tuple(renderer.render(conversation).token_ids),
            images=tuple(iter_images(conversation)),
        )
        for conversation in conversations
        if max_images is None or len(list(iter_images(conversation))) <= max_images
    )


def _picture(info: ModelInfo, seed: int) -> InlineImage:
    """Draw a picture that every processor leaves alone: coarse random squares."""
    factor = info.grid.factor
    squares = np.random.default_rng([seed, 77]).integers(0, 256, size=(4, 6, 3), dtype=np.uint8)
    picture = Image.fromarray(squares).resize((3 * factor, 2 * factor), Image.Resampling.NEAREST)
    return ingest_image(picture, fit=info.grid)


async def read_canary(
    client: InferenceClient,
    prompts: tuple[Prompt, ...],
    *,
    temperature: float,
    policy_version: int,
    routing: Routing = ANYWHERE,
) -> Reading:
    """Sample a few next tokens of every prompt from the server, or from one of its ranks.

    Raises:
        StaleWeights: the server refused a prompt, or sampled from another version than it was given.
    """
    where = f"canary of {version_label(policy_version)}"
    requests = [
        client.generate(
            prompt, Sampling(temperature=temperature, max_tokens=1, seed=1000 * policy_version + number), routing
        )
        for prompt in prompts
        for number in range(_NUM_SAMPLES)
    ]
    try:
        answers: list[Generation] = await asyncio.gather(*requests)
    except InferenceError as error:
        raise StaleWeights(f"The {where} was not answered: {error}") from error
    for answer in answers:
        if answer.policy_version not in (None, policy_version):
            raise StaleWeights(
                f"The {where} was sampled from {version_label(answer.policy_version or 0)}. Another trainer updates "
                "the same server, or it was started anew."
            )
    return Reading(
        rows=np.repeat(np.arange(len(prompts)), _NUM_SAMPLES),
        token_ids=np.asarray([answer.token_ids[0] for answer in answers]),
        logprobs=np.asarray([answer.logprobs[0] for answer in answers], dtype=np.float64),
    )


def judge(
    reading: Reading, published_KV: np.ndarray, before_KV: np.ndarray | None, *, dtype: str, policy_version: int
) -> Verdict:
    """Decide whether the server serves the version it should.

    Args:
        reading: N sampled tokens.
        published_KV: [K, V] float32, nats, by the trainer at the version that should be served.
        before_KV: the same of the version that was served last for certain; None at the start.
        dtype: of the weights on both sides.
        policy_version: that should be served, for the error.
    Raises:
        StaleWeights: it serves something else.
    """
    wanted = published_KV[reading.rows, reading.token_ids].astype(np.float64)
    log_ratio = wanted - reading.logprobs
    # A banned token lies 1e30 nats away: infinite or NaN, and refused below.
    with np.errstate(over="ignore", invalid="ignore"):
        kl = float(np.mean(np.expm1(log_ratio) - log_ratio))
    error = float(np.mean(np.abs(log_ratio)))
    label = version_label(policy_version)
    is_clear = before_KV is None
    if before_KV is not None:
        before = before_KV[reading.rows, reading.token_ids].astype(np.float64)
        error_before = float(np.mean(np.abs(before - reading.logprobs)))
        is_measurable = float(np.mean(np.abs(before - wanted))) > _SMALLEST_CHANGE
        is_clear = is_measurable and error < _CLEARLY_LESS * error_before
        if is_measurable and error_before < _CLEARLY_LESS * error:
            raise StaleWeights(
                f"The server said that it serves {label}, but its logprobs of the canary prompts are those of the "
                f"weights before (mean |difference| {error_before:.2g} nats to those, {error:.2g} to {label}): the "
                "update did nothing. No rollout of it was trained on. See the server's log; for vLLM try another "
                "inference.weight_update."
            )
    # NaN is not below either.
    if not kl < MAX_KL[dtype]:
        raise StaleWeights(
            f"The server's logprobs of the canary prompts are not the trainer's at {label}: mean mismatch KL {kl:.3g}, "
            f"wanted below {MAX_KL[dtype]:g} for {dtype}. It serves other weights, other pixels or other logprobs; "
            "`latepix doctor` and `latepix parity` show which."
        )
    return Verdict(kl=kl, is_clear=is_clear)
