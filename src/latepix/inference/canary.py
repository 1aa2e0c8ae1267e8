"""The canary: a few fixed prompts whose next-token distribution both sides compute after every publish.

A server may say that it loaded new weights and go on serving others (a reload that did nothing, a stale cache, a
layout it read wrongly). So the trainer publishes, with every version, the log-probabilities [K, V] of the next token
of K fixed prompts, with and without pictures; the server is asked for a few tokens of the same prompts, as in a
rollout, and its logprobs are held against the published ones. The pictures are the same every time, so that a picture
or encoder cache that was not emptied shows.

What is decided from the logprobs of the sampled tokens (`judge`):

* too far from the version it should be: refused;
* closer to the version it served before than to the new one, by more than rounding: the update did nothing;
* as close to both, since the step was smaller than the rounding: no decision, and the older version stays the one to
  compare with, so that a server that stands still is found out a few steps later.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
from PIL import Image

from latepix.config.schema import RunConfig
from latepix.errors import ConfigError, InferenceError, StaleWeights, TransportError
from latepix.families.model_info import ModelInfo
from latepix.inference.client import ANYWHERE, Generation, InferenceClient, Prompt, Routing, Sampling
from latepix.inference.contract import version_label
from latepix.inference.render import MessageRenderer
from latepix.trace.ingress import InlineImage, ingest_image
from latepix.trace.messages import assistant_message, iter_images, user_message

#: Tokens sampled for each prompt, at most.
_NUM_SAMPLES = 8
#: Largest mean mismatch KL in nats at temperature 1, by dtype: what rounding explains (measured: 5e-9 and 2e-3), with
#: room. Differences of logits count 1 / temperature times in logprobs, and squared in KL.
MAX_KL = {"float32": 1e-6, "bfloat16": 0.015}
#: Mean |log-probability difference| that rounding explains at the least, nats, by dtype. In bfloat16 a peaked policy
#: gives a handful of tokens with hardly any rounding, and then one with a lot: measured noise alone is too small.
_LEAST_NOISE = {"float32": 1e-6, "bfloat16": 2e-2}
#: A difference is more than rounding if it is that many times the rounding seen so far.
_BEYOND_NOISE = 3.0
#: A version explains the logprobs better if its mean error is below this share of the other's.
_CLEARLY_LESS = 0.5


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
        error: mean |log-probability difference| against it, nats.
        is_clear: the version before fits clearly worse, so this one can be told from it.
    """

    kl: float
    error: float
    is_clear: bool


def canary_prompts(renderer: MessageRenderer, *, max_images: int, max_tokens: int) -> tuple[Prompt, ...]:
    """Build the K prompts: text alone, one picture, two pictures in either order, and a second turn after a picture.

    Args:
        renderer: of the model.
        max_images: pictures that the server takes in one prompt; prompts with more are left out.
        max_tokens: longest prompt, expanded; longer ones are left out.
    Raises:
        ConfigError: not even the prompt without a picture fits.
    """
    info = renderer.info
    one, two = (_picture(info, seed) for seed in (0, 1))
    conversations = (
        [user_message("Say a number.")],
        [user_message(one, "What is this?")],
        [user_message("Describe", two)],
        [user_message(one, "and", two, "Which one?")],
        [user_message(two, "and", one, "Which one?")],
        [user_message(two, "What is this?"), assistant_message("A picture."), user_message("Which colour?")],
    )
    prompts = []
    for conversation in conversations:
        images = tuple(iter_images(conversation))
        token_ids = tuple(renderer.render(conversation).token_ids)
        if len(images) <= max_images and len(info.expand(token_ids, images)[0]) <= max_tokens:
            prompts.append(Prompt(token_ids=token_ids, images=images))
    if not prompts:
        raise ConfigError(
            f"inference.max_model_len: no prompt to check the server with fits into {max_tokens} tokens; give it room "
            "for a conversation."
        )
    return tuple(prompts)


def prompts_of(config: RunConfig, renderer: MessageRenderer) -> tuple[Prompt, ...]:
    """Return the canary prompts of a run: the same in trainer and orchestrator.

    Raises:
        ConfigError: the model's length leaves no room for any.
    """
    longest = renderer.info.max_len(config.inference.max_model_len)
    return canary_prompts(renderer, max_images=config.images.max_per_prompt, max_tokens=longest - 1)


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    """Return the hash of the prompts: two sides with the same one talk about the same rows."""
    parts = [[list(prompt.token_ids), [image.sha256 for image in prompt.images]] for prompt in prompts]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


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
    num_samples: int = _NUM_SAMPLES,
    routing: Routing = ANYWHERE,
) -> Reading:
    """Sample a few next tokens of every prompt from the server, or from one of its ranks.

    Args:
        client: of the server.
        prompts: K prompts.
        temperature: of the run.
        policy_version: that the server was given.
        num_samples: tokens of each prompt; they travel as one request, which the server must take.
        routing: which rank.
    Raises:
        TransportError: the server did not answer a prompt.
        StaleWeights: it sampled from another version than it was given.
    """
    num_samples = min(num_samples, _NUM_SAMPLES)
    where = f"canary of {version_label(policy_version)}"
    requests = [
        client.generate(
            prompt, Sampling(temperature=temperature, max_tokens=1, seed=1000 * policy_version + number), routing
        )
        for prompt in prompts
        for number in range(num_samples)
    ]
    try:
        answers: list[Generation] = await asyncio.gather(*requests)
    except InferenceError as error:
        raise TransportError(f"The {where} was not answered: {error}") from error
    for answer in answers:
        if answer.policy_version not in (None, policy_version):
            raise StaleWeights(
                f"The {where} was sampled from {version_label(answer.policy_version or 0)}. Another trainer updates "
                "the same server, or it was started anew."
            )
    return Reading(
        rows=np.repeat(np.arange(len(prompts)), num_samples),
        token_ids=np.asarray([answer.token_ids[0] for answer in answers]),
        logprobs=np.asarray([answer.logprobs[0] for answer in answers], dtype=np.float64),
    )


def judge(
    reading: Reading,
    published_KV: np.ndarray,
    before_KV: np.ndarray | None,
    *,
    dtype: str,
    temperature: float,
    policy_version: int,
    noise: float = 0.0,
) -> Verdict:
    """Decide whether the server serves the version it should.

    Args:
        reading: N sampled tokens; equal ones of a prompt count once.
        published_KV: [K, V] float32, nats, by the trainer at the version that should be served.
        before_KV: the same of the version that was served last for certain; None at the start.
        dtype: of the weights on both sides.
        temperature: of both.
        policy_version: that should be served, for the error.
        noise: largest `error` of earlier readings that were clear, nats: what rounding does in this model.
    Raises:
        StaleWeights: it serves something else.
    """
    _, first = np.unique(np.stack([reading.rows, reading.token_ids]), axis=1, return_index=True)
    rows, tokens, served = reading.rows[first], reading.token_ids[first], reading.logprobs[first]
    wanted = published_KV[rows, tokens].astype(np.float64)
    # A server that is far off gives infinities, which are refused below.
    with np.errstate(over="ignore", invalid="ignore"):
        log_ratio = wanted - served
        kl = float(np.mean(np.expm1(log_ratio) - log_ratio))
    error = float(np.mean(np.abs(log_ratio)))
    label = version_label(policy_version)
    beyond = _BEYOND_NOISE * max(noise, _LEAST_NOISE[dtype])
    is_clear = before_KV is None
    if before_KV is not None:
        before = before_KV[rows, tokens].astype(np.float64)
        error_before = float(np.mean(np.abs(before - served)))
        is_measurable = float(np.mean(np.abs(before - wanted))) > beyond
        is_clear = is_measurable and error < _CLEARLY_LESS * error_before
        if is_measurable and error > beyond and error_before < _CLEARLY_LESS * error:
            raise StaleWeights(
                f"The server said that it serves {label}, but its logprobs of the canary prompts are those of the "
                f"weights before (mean |difference| {error_before:.2g} nats to those, {error:.2g} to {label}): the "
                "update did nothing. No rollout of it was trained on. See the server's log; for vLLM try another "
                "inference.weight_update."
            )
    limit = MAX_KL[dtype] / min(1.0, temperature) ** 2
    # NaN is not below either.
    if not kl < limit:
        raise StaleWeights(
            f"The server's logprobs of the canary prompts are not the trainer's at {label}: mean mismatch KL {kl:.3g}, "
            f"wanted below {limit:.3g} ({dtype}, temperature {temperature:g}). It serves other weights, other pixels "
            "or other logprobs; `latepix doctor` and `latepix parity` show which."
        )
    return Verdict(kl=kl, error=error, is_clear=is_clear)
