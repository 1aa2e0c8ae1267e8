from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from latepix.config.schema import EnvironmentConfig
from latepix.environments.base import Environment, Score, Split, Task, Turn, load_environment
from latepix.errors import ConfigError
from latepix.families.model_info import ModelInfo
from latepix.inference.render import MessageRenderer, RenderedPrompt
from latepix.sft import demonstration_sample
from latepix.trace.ingress import InlineImage, ingest_image
from latepix.trace.messages import Message, TextPart, user_message
from latepix.trace.training import TrainingSample
from tests.tiny.pictures import make_image

A, B = make_image(seed=1), make_image(width=64, height=96, seed=2)


class Guided(Environment):
    """Demonstrates the turns that a test wants."""

    name = "guided"

    def __init__(self, turns: Sequence[Turn]) -> None:
        super().__init__(EnvironmentConfig(), ingest_image)
        self._turns = turns

    def num_tasks(self, split: Split) -> int:
        return 1

    def task(self, split: Split, index: int) -> Task:
        return Task(id="task-0", messages=(user_message("never shown"),), answer="never said")

    def score(self, task: Task, answer: Message) -> Score:
        return Score(reward=0.0)

    def demonstration_turns(self, task: Task, rng: np.random.Generator) -> Sequence[Turn]:
        return self._turns


TURNS = (
    Turn(messages=(user_message(A, B, "which digit?"),), answer="7"),
    Turn(messages=(Message(role="tool", content=(TextPart(text="<|image_pad|>"),), tool_call_id="c"),), answer="no 8"),
    Turn(messages=(user_message("first"), user_message("and", A, A, "?")), answer="77 square"),
)


def sample_of(environment: Environment, renderer: MessageRenderer, *, index: int = 0, seed: int = 0) -> TrainingSample:
    return demonstration_sample(environment, renderer, index, np.random.default_rng(seed))


def expand(token_ids: Sequence[int], images: Sequence[InlineImage], info: ModelInfo) -> list[int]:
    """Repeat every picture's placeholder, the plain way."""
    left = list(images)
    out = []
    for token in token_ids:
        out += [token] * (info.num_image_tokens(left.pop(0)) if token == info.image_placeholder_id else 1)
    assert not left
    return out


def trained_runs(sample: TrainingSample) -> list[list[int]]:
    """Return the runs of trained tokens."""
    edges = np.flatnonzero(np.diff(sample.loss_mask.astype(int), prepend=0, append=0))
    return [sample.token_ids[start:end].tolist() for start, end in edges.reshape(-1, 2)]


def test_the_tokens_are_those_of_rendering_turn_by_turn(info: ModelInfo, renderer: MessageRenderer) -> None:
    first, second, third = TURNS
    prompt = renderer.render(first.messages).token_ids
    said = renderer.answer_ids(first.answer)
    for turn in (second, third):
        extended = renderer.extend(prompt, said, turn.messages)
        assert extended is not None
        prompt, said = extended.token_ids, renderer.answer_ids(turn.answer)
    sample = sample_of(Guided(TURNS), renderer)
    assert sample.token_ids.tolist() == expand([*prompt, *said], [A, B, A, A], info)


def test_every_answer_is_trained_and_nothing_else(renderer: MessageRenderer) -> None:
    sample = sample_of(Guided(TURNS), renderer)
    assert trained_runs(sample) == [renderer.answer_ids(turn.answer) for turn in TURNS]
    np.testing.assert_array_equal(sample.advantages, sample.loss_mask.astype(np.float32))


def test_ranges_of_every_turn_cover_their_pictures(info: ModelInfo, renderer: MessageRenderer) -> None:
    sample = sample_of(Guided(TURNS), renderer)
    assert [image for image, _, _ in sample.mm_refs.slots()] == [A, B, A, A]
    assert [image.sha256 for image in sample.mm_refs.images] == [A.sha256, B.sha256]
    covered = {at for _, offset, length in sample.mm_refs.slots() for at in range(offset, offset + length)}
    # The text `<|image_pad|>` in the tool's message is no placeholder.
    assert covered == set(np.flatnonzero(sample.token_ids == info.image_placeholder_id).tolist())


def test_one_turn_needs_no_method_of_its_own(info: ModelInfo, renderer: MessageRenderer) -> None:
    environment = load_environment(EnvironmentConfig(), ingest_image)
    task = environment.task("train", 3)
    sample = sample_of(environment, renderer, index=3)
    (picture,) = sample.mm_refs.images
    prompt = expand(renderer.render(task.messages).token_ids, [picture], info)
    assert sample.token_ids.tolist() == [*prompt, *renderer.answer_ids(task.answer)]
    assert trained_runs(sample) == [renderer.answer_ids(task.answer)]


def test_one_turn_draws_its_noise_as_demonstration_does(renderer: MessageRenderer) -> None:
    environment = load_environment(EnvironmentConfig(demonstration_noise=0.5), ingest_image)
    samples, direct = np.random.default_rng(7), np.random.default_rng(7)
    for index in range(20):
        sample = demonstration_sample(environment, renderer, index, samples)
        answer = environment.demonstration(environment.task("train", index), direct)
        assert trained_runs(sample) == [renderer.answer_ids(answer)]


def test_a_demonstration_without_turns_is_a_wrong_environment(renderer: MessageRenderer) -> None:
    with pytest.raises(ConfigError, match=r"guided, task task-0: its demonstration has 0 turns, wanted at least 1"):
        sample_of(Guided(()), renderer)


class Forgetful(MessageRenderer):
    """Stands for a template that rewrites earlier turns."""

    def extend(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], messages: Sequence[Message]
    ) -> RenderedPrompt | None:
        return None


def test_a_template_that_rewrites_earlier_turns_is_named(info: ModelInfo) -> None:
    forgetful = Forgetful(info)
    with pytest.raises(ConfigError, match=r"guided, task task-0, turn 1: the template of qwen3_vl rewrites earlier"):
        sample_of(Guided(TURNS), forgetful)
    assert len(trained_runs(sample_of(Guided(TURNS[:1]), forgetful))) == 1
