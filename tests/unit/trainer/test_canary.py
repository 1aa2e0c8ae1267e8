"""What the trainer publishes beside its weights: the distribution of the next token after fixed prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from latepix.config.schema import ModelConfig, RunConfig, TrainerConfig
from latepix.inference.canary import canary_prompts, prompts_sha256
from latepix.inference.contract import GenerateRequest, SamplingParams, image_part
from latepix.inference.local_engine import LocalEngine
from latepix.inference.render import MessageRenderer
from latepix.trace.training import TrainingSample
from latepix.trainer.canary import Canary
from latepix.trainer.forward import next_token_logprobs
from latepix.trainer.loop import _Publisher
from latepix.trainer.loss import cross_entropy
from latepix.trainer.step import TrainStep
from latepix.transport.handshake import HandshakeFolder
from latepix.transport.weights import WeightsFolder
from tests.tiny.pictures import make_image
from tests.tiny.policy import Policy, make_sample, run_forward, score

PICTURE = make_image(width=64, seed=1)


@pytest.fixture
def train_step(sharp_model: Path) -> Iterator[TrainStep]:
    train_step = TrainStep(ModelConfig(path=sharp_model), TrainerConfig(), loss=cross_entropy, total_steps=1)
    yield train_step
    train_step.close()


@pytest.fixture(scope="module")
def engine(sharp_model: Path) -> LocalEngine:
    return LocalEngine(sharp_model)


def make_samples(policy: Policy, *, temperature: float = 1.0) -> list[TrainingSample]:
    """Build samples of different lengths, each with one trained token at its end."""
    parts = [(3, PICTURE, 2), (4,), (PICTURE, 1, make_image(seed=2), 6)]
    return [
        make_sample(policy.info, *some, answer=1, seed=seed, temperature=temperature) for seed, some in enumerate(parts)
    ]


def without_last(sample: TrainingSample) -> TrainingSample:
    """Cut the trained token off: what is left is its prompt."""
    names = ("token_ids", "loss_mask", "inference_logprobs", "advantages")
    return msgspec.structs.replace(sample, **{name: getattr(sample, name)[:-1] for name in names})


def next_tokens(policy: Policy, samples: list[TrainingSample], **how: Any) -> torch.Tensor:
    with torch.no_grad():
        return run_forward(next_token_logprobs, policy, samples, **how)


def test_every_row_is_a_distribution_without_banned_ids(policy: Policy) -> None:
    logprobs = next_tokens(policy, make_samples(policy))
    assert logprobs.shape == (3, policy.info.vocab_size)
    assert logprobs.dtype == torch.float32
    probabilities = logprobs.double().exp()
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(3, dtype=torch.double), atol=1e-5, rtol=0)
    assert policy.info.banned_ids
    assert float(probabilities[:, list(policy.info.banned_ids)].max()) == 0
    others = np.setdiff1d(np.arange(policy.info.vocab_size), policy.info.banned_ids)
    assert bool((logprobs[:, others] > -1e4).all())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_trained_token_has_the_logprob_of_the_next_token_after_its_prompt(policy: Policy, temperature: float) -> None:
    samples = make_samples(policy, temperature=temperature)
    with torch.no_grad():
        trained = score(policy, samples).trainer_logprobs
    after = next_tokens(policy, [without_last(sample) for sample in samples])
    tokens = torch.tensor([int(sample.token_ids[-1]) for sample in samples])
    # Other shapes of the same sums in float32.
    torch.testing.assert_close(after[torch.arange(3), tokens], trained, atol=1e-4, rtol=1e-4)


def test_each_sample_has_its_own_temperature(policy: Policy) -> None:
    samples = make_samples(policy)
    plain = next_tokens(policy, samples)
    cool = next_tokens(policy, [samples[0], *make_samples(policy, temperature=0.5)[1:]])
    torch.testing.assert_close(cool[0], plain[0], atol=1e-5, rtol=0)
    allowed = np.setdiff1d(np.arange(policy.info.vocab_size), policy.info.banned_ids)
    expected = torch.log_softmax(plain[1:, allowed] / 0.5, dim=-1)
    torch.testing.assert_close(cool[1:, allowed], expected, atol=1e-4, rtol=1e-4)


def test_the_layout_changes_nothing(policy: Policy) -> None:
    samples = make_samples(policy)
    packed, padded = (next_tokens(policy, samples, layout=layout) for layout in ("packed", "padded"))
    alone = torch.cat([next_tokens(policy, [sample]) for sample in samples])
    allowed = np.setdiff1d(np.arange(policy.info.vocab_size), policy.info.banned_ids)
    for other in (padded, alone):
        torch.testing.assert_close(packed[:, allowed], other[:, allowed], atol=1e-4, rtol=1e-4)


def make_canary(train_step: TrainStep, *, temperature: float = 1.0, max_images: int = 64) -> Canary:
    prompts = canary_prompts(MessageRenderer(train_step.info), max_images=max_images, max_tokens=4095)
    return Canary(train_step, prompts, temperature=temperature)


def test_the_canary_answers_every_prompt_differently(train_step: TrainStep) -> None:
    logprobs = make_canary(train_step, temperature=0.7).logprobs()
    assert logprobs.shape == (6, train_step.info.vocab_size)
    assert logprobs.dtype == np.float32
    np.testing.assert_allclose(np.exp(logprobs.astype(np.float64)).sum(axis=1), 1, atol=1e-5)
    assert len({row.tobytes() for row in logprobs}) == 6


@pytest.mark.parametrize("row", range(6))
def test_an_engine_that_is_sent_the_prompts_answers_as_the_canary_says(
    train_step: TrainStep, engine: LocalEngine, row: int
) -> None:
    prompt = canary_prompts(MessageRenderer(train_step.info), max_images=64, max_tokens=4095)[row]
    request = GenerateRequest(
        token_ids=list(prompt.token_ids),
        content_parts=[image_part(image.url) for image in prompt.images],
        sampling_params=SamplingParams(temperature=0.7, max_tokens=1, n=6, seed=3),
    )
    (answers,) = engine.generate([engine.prepare(request)])
    canary = make_canary(train_step, temperature=0.7).logprobs()[row]
    expected = [canary[answer.token_ids[0]] for answer in answers]
    np.testing.assert_allclose([answer.logprobs[0] for answer in answers], expected, atol=1e-4, rtol=1e-4)


def test_the_canary_is_of_the_weights_of_now(train_step: TrainStep) -> None:
    canary = make_canary(train_step)
    first, again = canary.logprobs(), canary.logprobs()
    np.testing.assert_array_equal(first, again)
    change(train_step)
    assert np.abs(np.exp(canary.logprobs()) - np.exp(first)).max() > 1e-3


def test_the_canary_leaves_no_gradient(train_step: TrainStep) -> None:
    make_canary(train_step).logprobs()
    assert all(parameter.grad is None for parameter in train_step.model.parameters())


def test_the_canary_of_a_run_of_one_picture_leaves_out_two(train_step: TrainStep) -> None:
    every = make_canary(train_step).logprobs()
    allowed = np.setdiff1d(np.arange(train_step.info.vocab_size), train_step.info.banned_ids)
    some = make_canary(train_step, max_images=1).logprobs()
    assert some.shape[0] == 4
    np.testing.assert_allclose(some[:, allowed], every[[0, 1, 2, 5]][:, allowed], atol=1e-4, rtol=1e-4)


def change(train_step: TrainStep) -> None:
    """Move the weights a little."""
    with torch.no_grad():
        for parameter in train_step.model.parameters():
            parameter.mul_(1.01)


class WatchedWeights(WeightsFolder):
    """Notes which canaries are there when weights appear."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._canary = run_dir / "canary"
        self.seen: list[tuple[int, list[str]]] = []

    def publish(self, policy_version: int, write: Any) -> Path:
        self.seen.append((policy_version, sorted(path.name for path in self._canary.iterdir())))
        return super().publish(policy_version, write)


def make_publisher(train_step: TrainStep, out: Path) -> tuple[_Publisher, WatchedWeights, HandshakeFolder]:
    config = RunConfig(output_dir=out, model=ModelConfig(path=train_step.source))
    weights = WatchedWeights(out)
    return _Publisher(config, train_step, weights), weights, HandshakeFolder(out)


def test_a_trainer_greets_with_its_facts_and_the_canary_it_starts_from(train_step: TrainStep, tmp_path: Path) -> None:
    publisher, weights, folder = make_publisher(train_step, tmp_path)
    publisher.greet()
    facts = folder.receive_facts(timeout_s=1)
    assert (facts.engine, facts.model_type, facts.dtype) == ("trainer", "qwen3_vl", "float32")
    prompts = canary_prompts(MessageRenderer(train_step.info), max_images=64, max_tokens=4095)
    assert facts.canary_sha256 == prompts_sha256(prompts)
    published = folder.receive_canary(0, shape=(6, train_step.info.vocab_size), timeout_s=1)
    np.testing.assert_array_equal(published, make_canary(train_step).logprobs())
    assert weights.seen == []


def test_weights_appear_after_the_canary_that_proves_them(train_step: TrainStep, tmp_path: Path) -> None:
    publisher, weights, folder = make_publisher(train_step, tmp_path)
    change(train_step)
    publisher.publish(1)
    assert weights.seen == [(1, ["step_000001.npy"])]
    published = folder.receive_canary(1, shape=(6, train_step.info.vocab_size), timeout_s=1)
    np.testing.assert_array_equal(published, make_canary(train_step).logprobs())
    written = load_file(weights.version_path(1) / "model.safetensors")
    own = train_step.adapter.hub_state_dict(train_step.model)
    assert written.keys() == own.keys()
    assert all(torch.equal(written[name], own[name]) for name in own)


def test_old_weights_go_with_their_canaries(train_step: TrainStep, tmp_path: Path) -> None:
    publisher, weights, _ = make_publisher(train_step, tmp_path)
    publisher.greet()
    for version in (1, 2, 3):
        publisher.publish(version)
    publisher.prune(keep_from=2)
    assert sorted(path.name for path in (tmp_path / "canary").iterdir()) == ["step_000002.npy", "step_000003.npy"]
    assert sorted(path.name for path in weights.path.iterdir()) == ["step_000002", "step_000003"]
