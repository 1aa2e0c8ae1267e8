from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from latepix.config.schema import EnvironmentConfig
from latepix.environments.base import Environment, Ingest, Score, Split, Task, exact_match, load_environment
from latepix.environments.codeword import Codeword
from latepix.environments.digits import Digits, DigitSum
from latepix.errors import ConfigError
from latepix.trace.ingress import ingest_image
from latepix.trace.messages import Message, assistant_message, user_message


class Echo(Environment):
    """Wants its own question back."""

    name = "echo"

    def num_tasks(self, split: Split) -> int:
        return 3

    def task(self, split: Split, index: int) -> Task:
        return Task(id=str(index), messages=(user_message(f"say {index}"),), answer=f"say {index}")

    def score(self, task: Task, answer: Message) -> Score:
        return exact_match(task, answer)


class EchoPolicy:
    """Says what it was told."""

    async def respond(self, messages: Sequence[Message], *, history: Sequence[Message] | None = None) -> Message:
        return assistant_message(messages[-1].text)


def load(kind: str, **settings: object) -> Environment:
    return load_environment(EnvironmentConfig.model_validate({"type": kind, **settings}), ingest_image)


@pytest.mark.parametrize(("kind", "cls"), [("digits", Digits), ("digit-sum", DigitSum), ("codeword", Codeword)])
def test_built_in_environments_are_loaded_by_name(kind: str, cls: type[Environment]) -> None:
    environment = load(kind)
    assert type(environment) is cls
    assert environment.name == kind


def test_an_environment_of_ones_own_is_loaded_by_its_path() -> None:
    assert load("latepix.environments.digits:DigitSum").name == "digit-sum"


def test_an_unknown_environment_is_named_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^environment.type: 'digit' is unknown. Known: codeword, digit-sum, digits, or `module:Class`",
    ):
        load("digit")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        (
            "no_such_module:Class",
            "cannot import no_such_module:Class: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("latepix.environments.digits:Nothing", "cannot import .*: AttributeError: .*has no attribute 'Nothing'"),
        ("latepix.environments.digits:", "cannot import latepix.environments.digits:"),
        (":Digits", "cannot import :Digits"),
        ("latepix.environments.base:Task", "is not a subclass of latepix.environments.base.Environment"),
        ("latepix.environments.base:exact_match", "is not a subclass"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_named(path: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^environment.type: .*{problem}"):
        load(path)


def test_a_module_that_breaks_while_it_is_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_environment.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot import broken_environment:Mine: ZeroDivisionError: division by zero"):
        load("broken_environment:Mine")


def test_one_turn_is_played_unless_overridden() -> None:
    environment = Echo(EnvironmentConfig(), ingest_image)
    assert asyncio.run(environment.rollout(environment.task("train", 2), EchoPolicy())) == Score(reward=1.0)


@pytest.mark.parametrize(
    ("text", "reward"), [("7", 1.0), (" 7\n", 1.0), ("77", 0.0), ("", 0.0), ("seven", 0.0), ("7.", 0.0)]
)
def test_exact_match_wants_the_answer_and_nothing_else(text: str, reward: float) -> None:
    task = Task(id="t", messages=(), answer="7")
    assert exact_match(task, assistant_message(text)).reward == reward


def test_demonstrations_are_the_first_tasks_and_their_answers() -> None:
    environment = Echo(EnvironmentConfig(num_demonstrations=2), ingest_image)
    assert environment.demonstration_indices() == [0, 1]
    assert environment.demonstration(environment.task("train", 1), np.random.default_rng(0)) == "say 1"
    assert Echo(EnvironmentConfig(num_demonstrations=9), ingest_image).demonstration_indices() == [0, 1, 2]
    assert Echo(EnvironmentConfig(), ingest_image).demonstration_indices() == [0, 1, 2]


class Broken(Echo):
    """Cannot be built."""

    def __init__(self, config: EnvironmentConfig, ingest: Ingest) -> None:
        raise OSError("no such data set")


class Unfinished(Environment):
    """Lacks every method."""


@pytest.mark.parametrize(
    ("name", "problem"),
    [("Broken", "OSError: no such data set"), ("Unfinished", "TypeError: Can't instantiate abstract class")],
)
def test_an_environment_that_cannot_be_built_is_a_wrong_setting(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^environment.type: cannot build {__name__}:{name}: {problem}"):
        load(f"{__name__}:{name}")
