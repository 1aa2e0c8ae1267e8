from __future__ import annotations

import itertools
from collections import Counter
from typing import get_args

import numpy as np
import pytest
from sklearn.datasets import load_digits

from latepix.config.schema import EnvironmentConfig
from latepix.environments.base import Environment, Split, load_environment
from latepix.trace.ingress import InlineImage, ingest_image
from latepix.trace.messages import iter_images

SPLITS: tuple[Split, ...] = get_args(Split)


def load(kind: str = "digits", **settings: object) -> Environment:
    return load_environment(EnvironmentConfig.model_validate({"type": kind, **settings}), ingest_image)


def ids(environment: Environment, split: Split) -> list[str]:
    return [environment.task(split, index).id for index in range(environment.num_tasks(split))]


def source_pictures(environment: Environment, split: Split) -> set[int]:
    """Return which pictures of scikit-learn a split shows."""
    return {int(number) for name in ids(environment, split) for number in name.removeprefix(f"{split}-").split("+")}


def pictures_of(environment: Environment, split: Split, index: int) -> list[InlineImage]:
    return list(iter_images(environment.task(split, index).messages))


def test_splits_have_their_stated_sizes() -> None:
    environment = load()
    assert {split: environment.num_tasks(split) for split in SPLITS} == {"train": 1197, "validation": 240, "test": 360}


@pytest.mark.parametrize("kind", ["digits", "digit-sum"])
def test_no_picture_is_in_two_splits(kind: str) -> None:
    environment = load(kind, picture_px=8)
    shown = {split: source_pictures(environment, split) for split in SPLITS}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not shown[one] & shown[other]
    if kind == "digits":
        assert sum(map(len, shown.values())) == 1797


@pytest.mark.parametrize("kind", ["digits", "digit-sum"])
def test_tasks_are_the_same_every_time(kind: str) -> None:
    first, second = load(kind), load(kind)
    for split, index in itertools.product(SPLITS, (0, 1, 200)):
        assert first.task(split, index) == second.task(split, index) == first.task(split, index)


def test_the_splits_do_not_change_between_versions() -> None:
    # Results of different versions are compared on the same pictures.
    environment = load()
    assert [ids(environment, split)[:3] for split in SPLITS] == [
        ["train-15", "train-1165", "train-473"],
        ["validation-210", "validation-1561", "validation-461"],
        ["test-1579", "test-685", "test-672"],
    ]


def test_the_answer_is_the_digit_in_the_picture() -> None:
    environment = load(picture_px=8)
    data = load_digits()
    for index in range(20):
        task = environment.task("test", index)
        number = int(task.id.removeprefix("test-"))
        (picture,) = pictures_of(environment, "test", index)
        assert task.answer == str(data.target[number])
        grey = np.round(data.images[number] * (255 / 16))
        np.testing.assert_array_equal(np.asarray(picture.open())[..., 0], grey)


def test_pictures_have_the_size_that_was_asked_for() -> None:
    (picture,) = pictures_of(load(picture_px=48), "train", 0)
    assert (picture.width, picture.height) == (48, 48)


def test_pictures_come_through_the_door() -> None:
    taken = []

    def ingest(source: object) -> InlineImage:
        taken.append(source)
        return ingest_image(source)  # ty: ignore[invalid-argument-type]

    environment = load_environment(EnvironmentConfig(), ingest)
    for _ in range(2):
        environment.task("train", 0)
    assert len(taken) == 1


@pytest.mark.parametrize("kind", ["digits", "digit-sum"])
def test_blank_pictures_are_all_alike_and_keep_their_answers(kind: str) -> None:
    blank, seen = load(kind, blank_pictures=True), load(kind)
    hashes = {picture.sha256 for index in range(30) for picture in pictures_of(blank, "test", index)}
    assert len(hashes) == 1
    (picture, *_) = pictures_of(blank, "test", 0)
    assert (np.asarray(picture.open()) == 128).all()
    assert [blank.task("test", index).answer for index in range(30)] == [
        seen.task("test", index).answer for index in range(30)
    ]


def test_digit_sum_asks_for_the_sum_of_its_two_pictures() -> None:
    environment = load("digit-sum")
    labels = load_digits().target
    for index in range(50):
        task = environment.task("train", index)
        first, second = (int(number) for number in task.id.removeprefix("train-").split("+"))
        assert task.answer == str(labels[first] + labels[second])
        assert len(pictures_of(environment, "train", index)) == 2


def test_digit_sum_has_its_stated_sizes() -> None:
    environment = load("digit-sum")
    assert {split: environment.num_tasks(split) for split in SPLITS} == {"train": 4096, "validation": 256, "test": 512}


def test_demonstrations_hold_every_digit_equally_often() -> None:
    environment = load(num_demonstrations=120)
    indices = environment.demonstration_indices()
    assert len(set(indices)) == 120
    counts = Counter(environment.task("train", index).answer for index in indices)
    assert counts == {str(digit): 12 for digit in range(10)}


def test_all_training_tasks_can_be_demonstrated() -> None:
    assert sorted(load().demonstration_indices()) == list(range(1197))
    assert load("digit-sum").demonstration_indices() == list(range(4096))


@pytest.mark.parametrize(("kind", "highest"), [("digits", 9), ("digit-sum", 18)])
def test_noise_replaces_its_share_of_the_answers(kind: str, highest: int) -> None:
    environment = load(kind, demonstration_noise=0.5)
    task = environment.task("train", 0)
    rng = np.random.default_rng(0)
    shown = [environment.demonstration(task, rng) for _ in range(2000)]
    assert {int(text) for text in shown} == set(range(highest + 1))
    expected = 0.5 + 0.5 / (highest + 1)
    # Four standard deviations of 2,000 draws are 0.045.
    assert shown.count(task.answer) / 2000 == pytest.approx(expected, abs=0.045)


def test_without_noise_the_answer_is_shown() -> None:
    environment = load()
    task = environment.task("train", 0)
    assert {environment.demonstration(task, np.random.default_rng(seed)) for seed in range(20)} == {task.answer}
