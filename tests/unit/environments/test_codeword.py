from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from latepix.config.schema import EnvironmentConfig
from latepix.environments.base import Environment, Score, Split, load_environment
from latepix.families.model_info import read_model_info
from latepix.inference.client import Sampling
from latepix.inference.render import MessageRenderer
from latepix.orchestrator.batch import validate_sample
from latepix.orchestrator.rollout import RolloutSpec, play
from latepix.orchestrator.samples import trace_to_samples
from latepix.trace.graph import Trace
from latepix.trace.ingress import InlineImage, ingest_image
from latepix.trace.messages import Message, assistant_message, iter_images
from tests.tiny.servers import FakeClient

SPLITS: tuple[Split, ...] = get_args(Split)
#: Which of red, green and blue are high in a letter's colour.
CHANNELS = {"R": (0,), "G": (1,), "B": (2,), "Y": (0, 1)}
#: Squares shown in each turn; one turn at least shows a single one.
SHAPES = [shape for shape in itertools.product((1, 2), repeat=3) if shape != (2, 2, 2)]


class Scripted:
    """Gives one answer after another and remembers what it was shown."""

    def __init__(self, answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.shown: list[list[Message]] = []

    async def respond(self, messages: Sequence[Message], *, history: Sequence[Message] | None = None) -> Message:
        self.shown.append(list(messages))
        return assistant_message(self._answers.pop(0))


def load(**settings: object) -> Environment:
    return load_environment(EnvironmentConfig.model_validate({"type": "codeword", **settings}), ingest_image)


def groups(environment: Environment, split: Split, index: int) -> list[str]:
    """Return what each turn shows, as the task's id spells it."""
    return environment.task(split, index).id.removeprefix(f"{split}-").split("-")


def find(environment: Environment, *lengths: int, twins: bool = False) -> int:
    """Return a training task whose turns show so many squares; `twins` wants two of one colour in the last."""
    for index in range(environment.num_tasks("train")):
        word = groups(environment, "train", index)
        if tuple(map(len, word)) == lengths and (not twins or len(set(word[-1])) == 1):
            return index
    raise AssertionError(f"no task of {lengths}")


def prefixes(environment: Environment, split: Split, index: int) -> list[str]:
    return list(itertools.accumulate(groups(environment, split, index)))


def play_scripted(environment: Environment, index: int, answers: Sequence[str]) -> tuple[Score, Scripted]:
    policy = Scripted(answers)
    return asyncio.run(environment.rollout(environment.task("train", index), policy)), policy


def pictures(environment: Environment, split: Split, index: int) -> list[list[InlineImage]]:
    """Return the pictures of each turn."""
    policy = Scripted(["", "", ""])
    asyncio.run(environment.rollout(environment.task(split, index), policy))
    return [list(iter_images(messages)) for messages in policy.shown]


def colour_of(picture: InlineImage) -> str:
    """Tell a square's letter from its pixels: those that are not background."""
    pixels = np.asarray(picture.open(), dtype=int).reshape(-1, 3)
    shade = pixels[(pixels != 225).any(axis=1)].mean(axis=0)
    return next(letter for letter, high in CHANNELS.items() if tuple(np.flatnonzero(shade > 130)) == high)


def test_splits_have_their_stated_sizes_and_share_no_word() -> None:
    environment = load()
    words = {
        split: {"-".join(groups(environment, split, index)) for index in range(environment.num_tasks(split))}
        for split in SPLITS
    }
    assert {split: len(found) for split, found in words.items()} == {"train": 1728, "validation": 240, "test": 400}
    assert len(set().union(*words.values())) == 2368


def test_no_shape_of_words_prevails() -> None:
    environment = load()
    shapes = Counter(
        tuple(map(len, groups(environment, split, index)))
        for split in SPLITS
        for index in range(environment.num_tasks(split))
    )
    assert shapes == {shape: min(512, 4 ** sum(shape)) for shape in SHAPES}


def test_no_held_out_picture_is_trained_on() -> None:
    environment = load()
    shown = {
        split: {
            picture.sha256
            for index in range(0, environment.num_tasks(split), step)
            for turn in pictures(environment, split, index)
            for picture in turn
        }
        for split, step in (("train", 1), ("validation", 1), ("test", 1))
    }
    # Four colours, and all their shades turn up.
    assert {split: len(found) for split, found in shown.items()} == {"train": 384, "validation": 96, "test": 96}
    for one, other in itertools.combinations(shown, 2):
        assert not shown[one] & shown[other]


def test_tasks_are_the_same_every_time() -> None:
    first, second = load(), load()
    for split, index in itertools.product(SPLITS, (0, 1, 200)):
        assert first.task(split, index) == second.task(split, index) == first.task(split, index)
        assert pictures(first, split, index) == pictures(second, split, index) == pictures(first, split, index)


def test_the_splits_do_not_change_between_versions() -> None:
    # Results of different versions are compared on the same words.
    environment = load()
    assert [[environment.task(split, index).id for index in range(2)] for split in SPLITS] == [
        ["train-G-G-BY", "train-YY-R-GR"],
        ["validation-GR-Y-BR", "validation-B-YB-GG"],
        ["test-Y-Y-BR", "test-GB-Y-RR"],
    ]


def test_the_squares_spell_the_answer() -> None:
    environment = load()
    for index in range(240):
        task = environment.task("validation", index)
        shown = pictures(environment, "validation", index)
        assert "".join(colour_of(picture) for turn in shown for picture in turn) == task.answer
        assert [len(turn) for turn in shown] == [len(group) for group in groups(environment, "validation", index)]
        assert list(iter_images(task.messages)) == shown[0]


def test_two_squares_of_one_colour_are_one_picture_twice() -> None:
    environment = load()
    *_, (first, second) = pictures(environment, "train", find(environment, 1, 2, 2, twins=True))
    assert first == second
    for index in range(100):
        for turn, group in zip(pictures(environment, "train", index), groups(environment, "train", index), strict=True):
            assert len({picture.sha256 for picture in turn}) == len(set(group))


def test_blank_pictures_are_all_alike_and_keep_their_answers() -> None:
    blank, seen = load(blank_pictures=True), load()
    shown = [picture for index in range(20) for turn in pictures(blank, "test", index) for picture in turn]
    assert len({picture.sha256 for picture in shown}) == 1
    assert (np.asarray(shown[0].open()) == 128).all()
    assert [blank.task("test", i).answer for i in range(20)] == [seen.task("test", i).answer for i in range(20)]


def test_pictures_have_the_size_that_was_asked_for() -> None:
    for side in (8, 48):
        (picture, *_), *_ = pictures(load(picture_px=side), "train", 0)
        assert (picture.width, picture.height) == (side, side)


def test_pictures_come_through_the_door_once_each() -> None:
    taken = []

    def ingest(source: object) -> InlineImage:
        taken.append(source)
        return ingest_image(source)  # ty: ignore[invalid-argument-type]

    environment = load_environment(EnvironmentConfig(type="codeword"), ingest)
    for _ in range(2):
        distinct = {picture.sha256 for turn in pictures(environment, "train", 0) for picture in turn}
    assert len(taken) == len(distinct)


def test_a_conversation_shows_one_turn_after_another_and_asks_each_time() -> None:
    environment = load()
    index = find(environment, 1, 2, 1)
    _, policy = play_scripted(environment, index, prefixes(environment, "train", index))
    assert [[one.text for one in messages] for messages in policy.shown] == [["code word?"], ["next?"], ["next?"]]
    assert [len(list(iter_images(messages))) for messages in policy.shown] == [1, 2, 1]


@pytest.mark.parametrize(
    ("wrong", "exact", "turns"),
    [
        ({}, 1.0, (1, 1, 1)),
        ({0: ""}, 1.0, (0, 1, 1)),
        ({0: "Z", 1: "ZZZZZZZ"}, 1.0, (0, 0, 1)),
        ({2: ""}, 0.0, (1, 1, 0)),
    ],
)
def test_the_reward_is_half_the_word_and_half_the_turns(
    wrong: dict[int, str], exact: float, turns: tuple[float, ...]
) -> None:
    environment = load()
    index = find(environment, 1, 2, 1)
    said = [wrong.get(turn, prefix) for turn, prefix in enumerate(prefixes(environment, "train", index))]
    score, _ = play_scripted(environment, index, said)
    assert score.parts == {"exact": exact} | {f"turn_{turn}": share for turn, share in enumerate(turns, start=1)}
    assert score.reward == pytest.approx(exact / 2 + sum(turns) / 6)


@pytest.mark.parametrize(
    ("change", "exact", "share"),
    [
        (lambda word: f" {word}\n", 1.0, 1.0),
        (lambda word: word[:-1], 0.0, 3 / 4),
        (lambda word: word + word[-1], 0.0, 4 / 5),
        (lambda word: "?" + word[1:], 0.0, 3 / 4),
        (lambda word: word.lower(), 0.0, 0.0),
        (lambda word: "", 0.0, 0.0),
    ],
)
def test_letters_are_counted_by_place(change: Callable[[str], str], exact: float, share: float) -> None:
    environment = load()
    index = find(environment, 1, 2, 1)
    first, second, word = prefixes(environment, "train", index)
    score, _ = play_scripted(environment, index, [first, second, change(word)])
    assert (score.parts["exact"], score.parts["turn_3"]) == (exact, share)
    assert environment.score(environment.task("train", index), assistant_message(change(word))).reward == exact


def demonstrations(environment: Environment, *, seed: int = 0, count: int = 300) -> list[tuple[str, list[str]]]:
    """Return (answer, what is said in each turn) of demonstrated tasks."""
    rng = np.random.default_rng(seed)
    tasks = [environment.task("train", index) for index in range(count)]
    return [(task.answer, [turn.answer for turn in environment.demonstration_turns(task, rng)]) for task in tasks]


def test_a_demonstration_is_the_conversation_of_a_rollout_with_the_right_answers() -> None:
    environment = load()
    for index in range(10):
        task = environment.task("train", index)
        turns = environment.demonstration_turns(task, np.random.default_rng(0))
        score, policy = play_scripted(environment, index, [turn.answer for turn in turns])
        assert score == Score(reward=1.0, parts={"exact": 1.0, "turn_1": 1.0, "turn_2": 1.0, "turn_3": 1.0})
        assert [list(turn.messages) for turn in turns] == policy.shown


def test_a_misread_square_stays_misread() -> None:
    shown = demonstrations(load(demonstration_noise=0.5))
    for answer, said in shown:
        assert said[0] == said[1][: len(said[0])]
        assert said[1] == said[2][: len(said[1])]
        assert len(said[2]) == len(answer)
    pairs = [pair for answer, said in shown for pair in zip(answer, said[2], strict=True)]
    # A misread letter is any of the four. Four standard deviations of 1,600 draws are 0.05.
    assert sum(one == other for one, other in pairs) / len(pairs) == pytest.approx(0.5 + 0.5 / 4, abs=0.05)


def test_demonstrations_hold_every_shape_equally_often() -> None:
    environment = load(num_demonstrations=42)
    indices = environment.demonstration_indices()
    assert len(set(indices)) == 42
    shapes = Counter(tuple(map(len, groups(environment, "train", index))) for index in indices)
    assert shapes == dict.fromkeys(SHAPES, 6)
    assert sorted(load().demonstration_indices()) == list(range(1728))


def play_served(model: Path, index: int, answers: Sequence[str]) -> tuple[Trace, FakeClient]:
    """Play a training task through renderer and trace, with a client that gives these answers."""
    info = read_model_info(model)
    renderer = MessageRenderer(info)
    environment = load()
    spec = RolloutSpec(
        trace_id="s0-g0-r0",
        task=environment.task("train", index),
        split="train",
        step=0,
        group_id=0,
        sampling=Sampling(temperature=1.0, max_tokens=7, seed=1),
    )

    async def main() -> tuple[Trace, FakeClient]:
        client = FakeClient(info=info, replies=[renderer.answer_ids(answer) for answer in answers])
        try:
            return await play(environment, client, renderer, spec, max_images=6, max_model_len=256), client
        finally:
            await client.close()

    return asyncio.run(main())


def test_a_rollout_keeps_the_pictures_of_earlier_turns_and_extends_what_was_sampled(tiny_model: Path) -> None:
    environment = load()
    index = find(environment, 1, 2, 2, twins=True)
    said = prefixes(environment, "train", index)
    trace, client = play_served(tiny_model, index, said)
    assert (trace.failure, trace.reward, trace.reward_parts["turn_2"]) == (None, 1.0, 1.0)
    assert [len(prompt.images) for prompt in client.prompts] == [1, 3, 5]
    for before, after in itertools.pairwise(client.prompts):
        assert after.images[: len(before.images)] == before.images
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
    (sample,) = trace_to_samples(trace)
    validate_sample(sample, read_model_info(tiny_model))
    # Five slots; the last two show the same picture.
    first, second = sample.mm_refs.refs[-2:]
    assert len(sample.mm_refs.refs) == 5
    assert first.image == second.image
    assert len(sample.mm_refs.images) == len({image.sha256 for image in client.prompts[-1].images})
    renderer = MessageRenderer(read_model_info(tiny_model))
    assert sample.token_ids[sample.loss_mask].tolist() == [t for text in said for t in renderer.answer_ids(text)]
