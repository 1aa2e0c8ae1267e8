"""The environment protocol: tasks, one rollout against a policy, a reward.

A single-turn environment gives tasks and scores the answer. One with several turns overrides `rollout` and calls
`policy.respond` as often as it likes; the conversation, its tokens and its pictures are recorded outside.
"""

from __future__ import annotations

import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np

from latepix.config.schema import EnvironmentConfig
from latepix.errors import ConfigError, EnvError, LatepixError
from latepix.trace.ingress import ImageSource, InlineImage
from latepix.trace.messages import Message

Split: TypeAlias = Literal["train", "validation", "test"]
#: Turns whatever picture an environment has into the canonical form (`ingest_image` with the run's settings).
Ingest: TypeAlias = Callable[[ImageSource], InlineImage]


class Task(msgspec.Struct, frozen=True):
    """One thing to do.

    Attributes:
        id: stable name, unique in its split.
        messages: the opening of the conversation.
        answer: what is expected, as text.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str


class Turn(msgspec.Struct, frozen=True):
    """One turn of a demonstration.

    Attributes:
        messages: what is new in the conversation before the answer.
        answer: what to say, as text.
    """

    messages: tuple[Message, ...]
    answer: str


class Score(msgspec.Struct, frozen=True):
    """What a rollout earned: the scalar that is trained on, and its named parts for people."""

    reward: float
    parts: dict[str, float] = {}


class Policy(Protocol):
    """The player, as an environment sees it."""

    async def respond(self, messages: Sequence[Message], *, history: Sequence[Message] | None = None) -> Message:
        """Add messages to the conversation and return the assistant's answer.

        Args:
            messages: what is new.
            history: replaces the conversation so far: edited history, a second attempt, a sub-agent.
        """
        ...


class Environment(ABC):
    """A source of tasks and rewards.

    Args:
        config: settings of the environment section.
        ingest: the door for pictures.
    """

    name = "environment"

    def __init__(self, config: EnvironmentConfig, ingest: Ingest) -> None:
        self.config = config
        self.ingest = ingest

    @abstractmethod
    def num_tasks(self, split: Split) -> int:
        """Return how many tasks a split has."""

    @abstractmethod
    def task(self, split: Split, index: int) -> Task:
        """Return one task; the same index always gives the same task."""

    @abstractmethod
    def score(self, task: Task, answer: Message) -> Score:
        """Judge the last answer of a rollout."""

    async def rollout(self, task: Task, policy: Policy) -> Score:
        """Play a task and return what it earned; one turn unless overridden."""
        return self.score(task, await policy.respond(task.messages))

    def demonstration(self, task: Task, rng: np.random.Generator) -> str:
        """Return an answer to imitate (SFT), for a task of one turn."""
        return task.answer

    def demonstration_turns(self, task: Task, rng: np.random.Generator) -> Sequence[Turn]:
        """Return a conversation to imitate (SFT): `demonstration` in one turn unless overridden.

        An environment with several turns gives the messages that `rollout` would add, each with its answer.
        """
        return (Turn(messages=task.messages, answer=self.demonstration(task, rng)),)

    def demonstration_indices(self) -> list[int]:
        """Return the training tasks that SFT may use, `num_demonstrations` of them or all."""
        limit = self.config.num_demonstrations or self.num_tasks("train")
        return list(range(min(limit, self.num_tasks("train"))))


def checked_task(environment: Environment, split: Split, index: int) -> Task:
    """Return a task of an environment, made sure to be one.

    Raises:
        EnvError: it is no `Task`, or its fields are of other types; says which.
        Exception: whatever the environment raises.
    """
    task = environment.task(split, index)
    if not isinstance(task, Task):
        raise EnvError(f"task({split!r}, {index}) gave {type(task).__name__}, wanted a Task")
    for name, text in (("id", task.id), ("answer", task.answer)):
        if not isinstance(text, str):
            raise EnvError(f"task({split!r}, {index}): {name} is {text!r}, wanted text")
        if text != plain_text(text):
            raise EnvError(f"task({split!r}, {index}): {name} holds characters that cannot be written as UTF-8")
    for message in task.messages:
        if not isinstance(message, Message):
            raise EnvError(
                f"task({split!r}, {index}): a message is {type(message).__name__}, wanted a Message (user_message(...))"
            )
    return task


def plain_text(text: str) -> str:
    """Return text that can be written as UTF-8: lone surrogates become question marks."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def count_tasks(environment: Environment, split: Split) -> int:
    """Return the number of tasks of a split, made sure to be one.

    Raises:
        ConfigError: the environment raised, or gave something else.
    """
    try:
        count = environment.num_tasks(split)
    except Exception as error:
        # Foreign code may raise anything.
        raise ConfigError(
            f"environment {environment.name}: num_tasks({split!r}) raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(count, int) or count < 0:
        raise ConfigError(f"environment {environment.name}: num_tasks({split!r}) gave {count!r}, wanted a number.")
    return count


def exact_match(task: Task, answer: Message) -> Score:
    """Reward 1 if the answer's text, without surrounding space, is exactly the expected one."""
    return Score(reward=float(answer.text.strip() == task.answer))


def load_environment(config: EnvironmentConfig, ingest: Ingest) -> Environment:
    """Build the environment that the config names.

    Raises:
        ConfigError: it is unknown, `module:Class` cannot be imported, or its constructor raised.
    """
    if ":" not in config.type:
        if config.type not in _BUILT_IN:
            raise ConfigError(
                f"environment.type: {config.type!r} is unknown. Known: {', '.join(sorted(_BUILT_IN))}, or "
                "`module:Class` for one of your own."
            )
        path = _BUILT_IN[config.type]
    else:
        path = config.type
    module_name, _, class_name = path.partition(":")
    # A module of the user's own may lie in the current folder, behind everything that is installed.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        cls: Any = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        # A module of the user's own may raise anything while it is imported.
        raise ConfigError(f"environment.type: cannot import {path}: {type(error).__name__}: {error}.") from error
    if not (isinstance(cls, type) and issubclass(cls, Environment)):
        raise ConfigError(f"environment.type: {path} is not a subclass of latepix.environments.base.Environment.")
    try:
        return cls(config, ingest)
    except LatepixError:
        raise
    except Exception as error:
        # The user's own code again; a method that is missing shows up here too.
        raise ConfigError(f"environment.type: cannot build {path}: {type(error).__name__}: {error}.") from error


_BUILT_IN = {
    "codeword": "latepix.environments.codeword:Codeword",
    "digits": "latepix.environments.digits:Digits",
    "digit-sum": "latepix.environments.digits:DigitSum",
}
