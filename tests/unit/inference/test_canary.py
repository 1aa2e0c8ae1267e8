from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from latepix.errors import ConfigError, InferenceError, StaleWeights, TransportError
from latepix.families.model_info import ModelInfo
from latepix.inference import canary
from latepix.inference.canary import Reading, Verdict, canary_prompts, judge, prompts_sha256, read_canary
from latepix.inference.client import ANYWHERE, Generation, Prompt, Routing, Sampling
from latepix.inference.render import MessageRenderer
from latepix.trace.ingress import GridFit
from tests.tiny.servers import FakeClient

#: Answers of a server that samples token 40, then 41, and so on: 8 for each of 6 prompts.
REPLIES = [[40 + number] for number in range(48)]


def make_logprobs(*, seed: int, rows: int = 4, vocab: int = 12) -> np.ndarray:
    """Return [K, V] float32 log-probabilities of random distributions."""
    logits = np.random.default_rng(seed).normal(size=(rows, vocab))
    return shifted(logits)


def shifted(logits_KV: np.ndarray, *, by: float = 0.0) -> np.ndarray:
    """Move logits along one fixed direction and normalize."""
    moved = logits_KV.astype(np.float64) + by * np.random.default_rng(99).normal(size=logits_KV.shape)
    return (moved - np.log(np.exp(moved).sum(axis=1, keepdims=True))).astype(np.float32)


def make_reading(served_KV: np.ndarray, *, off: float = 0.0, num: int = 8) -> Reading:
    """Sample as a server would that serves `served_KV`, `off` nats away from it for rounding, up and down in turn."""
    rng = np.random.default_rng(5)
    rows = np.repeat(np.arange(len(served_KV)), num)
    probabilities = np.exp(served_KV.astype(np.float64))
    token_ids = np.array([rng.choice(len(p), p=p / p.sum()) for p in probabilities[rows]])
    signs = np.where(np.arange(len(rows)) % 2, 1.0, -1.0)
    return Reading(rows=rows, token_ids=token_ids, logprobs=served_KV[rows, token_ids].astype(np.float64) + off * signs)


def judged(
    reading: Reading,
    published: np.ndarray,
    before: np.ndarray | None,
    *,
    dtype: str = "float32",
    temperature: float = 1.0,
    noise: float = 0.0,
) -> Verdict:
    return judge(reading, published, before, dtype=dtype, temperature=temperature, noise=noise, policy_version=3)


def prompts_of(renderer: MessageRenderer, *, max_images: int = 64, max_tokens: int = 4096) -> tuple[Prompt, ...]:
    return canary_prompts(renderer, max_images=max_images, max_tokens=max_tokens)


def test_a_server_at_the_right_version_passes_and_can_be_told_from_the_one_before() -> None:
    before, published = make_logprobs(seed=0), make_logprobs(seed=1)
    verdict = judged(make_reading(published, off=1e-4), published, before)
    assert verdict.is_clear
    assert verdict.kl == pytest.approx(0.5e-8, rel=1e-2)
    assert verdict.error == pytest.approx(1e-4, rel=1e-2)


def test_the_first_version_has_nothing_to_be_told_from() -> None:
    published = make_logprobs(seed=0)
    assert judged(make_reading(published), published, None) == Verdict(kl=0.0, error=0.0, is_clear=True)


def test_a_server_that_stands_still_is_refused_with_both_numbers() -> None:
    before, published = make_logprobs(seed=0), make_logprobs(seed=1)
    reading = make_reading(before, off=2e-4)
    with pytest.raises(StaleWeights) as caught:
        judged(reading, published, before)
    message = str(caught.value)
    assert message.startswith("The server said that it serves step-3, but its logprobs of the canary prompts are those")
    assert re.search(
        r"\(mean \|difference\| 0\.0002 nats to those, 1\.?\d* to step-3\): the update did nothing", message
    )


def test_a_step_below_the_rounding_passes_and_leaves_the_reference() -> None:
    before = make_logprobs(seed=0)
    published = shifted(before, by=1e-6)
    assert np.abs(published - before).max() > 0
    assert not judged(make_reading(published), published, before).is_clear


def test_a_server_as_close_to_both_versions_leaves_the_reference() -> None:
    before = make_logprobs(seed=0)
    middle, published = shifted(before, by=5e-4), shifted(before, by=1e-3)
    assert not judged(make_reading(middle), published, before).is_clear


def follow(served: Callable[[int], np.ndarray], versions: list[np.ndarray]) -> tuple[int, list[int]]:
    """Judge one version after another as the orchestrator does.

    Returns:
        The version that was refused (-1 for none), and those that could be told from the reference of then.
    """
    reference, clear = versions[0], []
    for number, published in enumerate(versions[1:], start=1):
        try:
            verdict = judged(make_reading(served(number), off=1e-4), published, reference, noise=1e-4)
        except StaleWeights:
            return number, clear
        if verdict.is_clear:
            reference = published
            clear.append(number)
    return -1, clear


def test_a_server_that_stands_still_over_tiny_steps_is_found_out_in_the_end() -> None:
    start = make_logprobs(seed=0)
    versions = [shifted(start, by=2e-5 * number) for number in range(80)]
    # One such step says nothing, which is why the reference has to stay.
    assert not judged(make_reading(start, off=1e-4), versions[1], start, noise=1e-4).is_clear
    refused, clear = follow(lambda number: start, versions)
    assert 5 < refused < 60
    assert clear == []


def test_a_server_that_follows_tiny_steps_is_never_refused_and_told_apart_now_and_then() -> None:
    versions = [shifted(make_logprobs(seed=0), by=2e-5 * number) for number in range(60)]
    refused, clear = follow(lambda number: versions[number], versions)
    assert refused == -1
    assert 1 <= len(clear) < 20


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -2000.0])
@pytest.mark.parametrize("has_reference", [True, False])
def test_logprobs_that_no_rounding_explains_are_refused(value: float, has_reference: bool) -> None:
    published = make_logprobs(seed=0)
    reading = make_reading(published)
    reading.logprobs[3] = value
    before = make_logprobs(seed=1) if has_reference else None
    with pytest.raises(StaleWeights, match=r"step-3: mean mismatch KL (nan|inf|\d\S*), wanted below"):
        judged(reading, published, before)


def test_a_banned_token_is_refused() -> None:
    published = make_logprobs(seed=0)
    reading = make_reading(published)
    published[:, reading.token_ids[0]] = -1e30
    with pytest.raises(StaleWeights, match="are not the trainer's at step-3"):
        judged(reading, published, None)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 0.015)])
def test_each_dtype_has_its_bound(dtype: str, bound: float) -> None:
    published = make_logprobs(seed=0)
    # For small d, exp(d) - 1 - d is d^2 / 2.
    inside, outside = np.sqrt(2 * bound * 0.9), np.sqrt(2 * bound * 1.1)
    assert judged(make_reading(published, off=inside), published, None, dtype=dtype).kl < bound
    with pytest.raises(
        StaleWeights, match=rf"wanted below {bound:.3g} \({dtype}, temperature 1\)\. It serves other weights"
    ):
        judged(make_reading(published, off=outside), published, None, dtype=dtype)


def test_below_temperature_one_rounding_counts_more() -> None:
    published = make_logprobs(seed=0)
    reading = make_reading(published, off=np.sqrt(2 * 1e-6 * 3))
    with pytest.raises(StaleWeights):
        judged(reading, published, None)
    assert judged(reading, published, None, temperature=0.5).kl == pytest.approx(3e-6, rel=0.01)
    with pytest.raises(StaleWeights, match=r"wanted below 1e-06 \(float32, temperature 2\)"):
        judged(reading, published, None, temperature=2.0)


def test_equal_tokens_of_a_prompt_count_once() -> None:
    published = make_logprobs(seed=0)
    rows, tokens = np.array([0, 0, 0, 1]), np.array([2, 2, 2, 5])
    served = published[rows, tokens].astype(np.float64) + np.array([4e-4, 4e-4, 4e-4, 2e-4])
    assert judged(Reading(rows, tokens, served), published, None).error == pytest.approx(3e-4, rel=1e-3)


def noisy(logits_KV: np.ndarray, seed: int) -> np.ndarray:
    """Return the distributions of one side whose logits are rounded in its own way."""
    return shifted(logits_KV + 0.01 * np.random.default_rng(seed).normal(size=logits_KV.shape))


@pytest.mark.parametrize("step", [0.0, 1e-3, 3e-3])
def test_a_server_that_follows_bfloat16_steps_below_its_rounding_is_never_refused(step: float) -> None:
    for seed in range(40):
        logits, direction = np.random.default_rng(seed).normal(size=(2, 6, 12))
        reference, noise = None, 0.0
        for version in range(8):
            weights = logits + step * version * direction
            published, served = (noisy(weights, 100 * seed + 2 * version + side) for side in range(2))
            verdict = judged(make_reading(served), published, reference, dtype="bfloat16", noise=noise)
            if verdict.is_clear:
                reference, noise = published, max(noise, verdict.error)
        # Measured, not given.
        assert 3e-3 < noise < 3e-2


def test_rounding_larger_than_the_step_is_never_taken_for_an_update_that_did_nothing() -> None:
    for seed in range(300):
        logits = np.random.default_rng(seed).normal(size=(6, 12))
        before, published, served = (noisy(logits, 3 * seed + number) for number in range(3))
        judged(make_reading(served), published, before, dtype="bfloat16", noise=0.008)


def test_a_peaked_policy_gives_few_tokens_and_no_false_alarm() -> None:
    # As a run does it: the noise of the first reading is all that is known.
    for seed in range(300):
        logits = 12 * np.random.default_rng(seed).normal(size=(6, 12))
        before, first, published, served = (noisy(logits, 4 * seed + number) for number in range(4))
        noise = judged(make_reading(first), before, None, dtype="bfloat16").error
        judged(make_reading(served), published, before, dtype="bfloat16", noise=noise)


def test_what_rounding_did_before_widens_what_it_may_do() -> None:
    before = make_logprobs(seed=0)
    published = shifted(before, by=1e-3)
    with pytest.raises(StaleWeights, match="did nothing"):
        judged(make_reading(before), published, before)
    assert not judged(make_reading(before), published, before, noise=1e-3).is_clear


def test_the_bound_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    published = make_logprobs(seed=0)
    reading = make_reading(published, off=1e-3)
    kl = judged(reading, published, None).kl
    monkeypatch.setitem(canary.MAX_KL, "float32", float(np.nextafter(kl, 1)))
    assert judged(reading, published, None).kl == kl
    monkeypatch.setitem(canary.MAX_KL, "float32", kl)
    with pytest.raises(StaleWeights):
        judged(reading, published, None)


def test_the_prompts_are_the_same_every_time(info: ModelInfo) -> None:
    first, again = (prompts_of(MessageRenderer(info)) for _ in range(2))
    assert first == again
    assert prompts_sha256(first) == prompts_sha256(again) != prompts_sha256(first[1:])


def test_every_picture_has_its_placeholder(renderer: MessageRenderer) -> None:
    prompts = prompts_of(renderer)
    placeholder = renderer.info.image_placeholder_id
    assert [len(prompt.images) for prompt in prompts] == [0, 1, 1, 2, 2, 1]
    assert [prompt.token_ids.count(placeholder) for prompt in prompts] == [0, 1, 1, 2, 2, 1]
    assert len({image.sha256 for image in prompts[3].images}) == 2


@pytest.mark.parametrize(("max_images", "expected"), [(1, [0, 1, 1, 1]), (2, [0, 1, 1, 2, 2, 1])])
def test_no_prompt_has_more_pictures_than_the_server_takes(
    renderer: MessageRenderer, max_images: int, expected: list[int]
) -> None:
    assert [len(prompt.images) for prompt in prompts_of(renderer, max_images=max_images)] == expected


def test_no_prompt_is_longer_than_the_model_takes(renderer: MessageRenderer) -> None:
    info = renderer.info

    def length(prompt: Prompt) -> int:
        return len(prompt.token_ids) + sum(info.num_image_tokens(image) - 1 for image in prompt.images)

    lengths = sorted(map(length, prompts_of(renderer)))
    assert max(map(length, prompts_of(renderer, max_tokens=lengths[2]))) == lengths[2]
    assert len(prompts_of(renderer, max_tokens=lengths[-1] - 1)) < len(lengths)
    with pytest.raises(ConfigError, match=r"inference\.max_model_len: no prompt .* fits into 3 tokens"):
        prompts_of(renderer, max_tokens=3)


@pytest.mark.parametrize(
    "grid",
    [
        GridFit(factor=32, min_pixels=1024, max_pixels=1024 * 1024),
        GridFit(factor=32, min_pixels=300_000, max_pixels=16_000_000),
        GridFit(factor=28, min_pixels=784, max_pixels=3136),
    ],
)
def test_no_processor_resizes_the_pictures(info: ModelInfo, grid: GridFit) -> None:
    prompts = prompts_of(MessageRenderer(msgspec.structs.replace(info, grid=grid)), max_tokens=1 << 20)
    sizes = {(image.width, image.height) for prompt in prompts for image in prompt.images}
    assert sizes
    assert all(grid.processed_size(*size) == size for size in sizes)


class RefusingClient(FakeClient):
    """A client whose server takes no pictures."""

    async def generate(self, prompt: Prompt, sampling: Sampling, routing: Routing = ANYWHERE) -> Generation:
        if prompt.images:
            raise InferenceError("HTTP 400: at most 0 images")
        return await super().generate(prompt, sampling, routing)


def read(client: FakeClient, renderer: MessageRenderer, *, policy_version: int = 3) -> Reading:
    return asyncio.run(read_canary(client, prompts_of(renderer), temperature=0.7, policy_version=policy_version))


def test_every_prompt_is_sampled_eight_times(renderer: MessageRenderer) -> None:
    client = FakeClient(info=renderer.info, replies=REPLIES)
    reading = read(client, renderer)
    assert reading.rows.tolist() == [row for row in range(6) for _ in range(8)]
    assert reading.token_ids.tolist() == list(range(40, 88))
    assert reading.logprobs.tolist() == [-0.5] * 48
    assert tuple(client.prompts[::8]) == prompts_of(renderer)


def test_a_prompt_is_not_asked_more_often_than_the_server_answers_at_once(renderer: MessageRenderer) -> None:
    client = FakeClient(info=renderer.info, replies=REPLIES)
    asyncio.run(read_canary(client, prompts_of(renderer), temperature=0.7, policy_version=3, num_samples=2))
    assert len(client.prompts) == 12


def test_samples_of_a_prompt_are_one_request_with_other_draws_at_every_version(renderer: MessageRenderer) -> None:
    seeds = []
    for version in (3, 4):
        client = FakeClient(
            info=renderer.info,
            replies=REPLIES,
            change=lambda one, version=version: msgspec.structs.replace(one, policy_version=version),
        )
        read(client, renderer, policy_version=version)
        assert {(sampling.temperature, sampling.max_tokens) for sampling in client.samplings} == {(0.7, 1)}
        seeds.append([sampling.seed for sampling in client.samplings[:8]])
    # Consecutive seeds travel as one request.
    assert all(np.diff(run).tolist() == [1] * 7 for run in seeds)
    assert set(seeds[0]).isdisjoint(seeds[1])


def test_a_server_that_does_not_say_its_version_is_believed(renderer: MessageRenderer) -> None:
    client = FakeClient(
        info=renderer.info,
        replies=REPLIES,
        change=lambda one: msgspec.structs.replace(one, policy_version=None),
    )
    assert len(read(client, renderer).rows) == 48


def test_a_canary_of_another_version_is_named(renderer: MessageRenderer) -> None:
    with pytest.raises(StaleWeights, match=r"^The canary of step-4 was sampled from step-3\. Another trainer"):
        read(FakeClient(info=renderer.info, replies=REPLIES), renderer, policy_version=4)


def test_a_refused_prompt_tells_why(renderer: MessageRenderer) -> None:
    with pytest.raises(TransportError, match=r"^The canary of step-3 was not answered: HTTP 400: at most 0") as caught:
        read(RefusingClient(info=renderer.info, replies=REPLIES), renderer)
    assert isinstance(caught.value.__cause__, InferenceError)
