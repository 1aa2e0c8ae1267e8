"""Environments that go wrong, to be named in a config as `tests.tiny.environments:Class`."""

from __future__ import annotations

import os
import sys
import zlib

from latepix.config.schema import EnvironmentConfig
from latepix.environments.base import Ingest, Policy, Score, Task
from latepix.environments.digits import Digits


class AlwaysRaises(Digits):
    """Every rollout fails."""

    name = "always-raises"

    async def rollout(self, task: Task, policy: Policy) -> Score:
        raise ZeroDivisionError(f"the simulator of {task.id} is out of order")


class RaisesInTraining(Digits):
    """Every rollout of training fails, evaluations do not."""

    name = "raises-in-training"

    async def rollout(self, task: Task, policy: Policy) -> Score:
        if task.id.startswith("train"):
            raise ZeroDivisionError(f"the simulator of {task.id} is out of order")
        return await super().rollout(task, policy)


class SometimesRaises(Digits):
    """Every tenth rollout of training fails, after the policy has answered."""

    name = "sometimes-raises"

    def __init__(self, config: EnvironmentConfig, ingest: Ingest) -> None:
        super().__init__(config, ingest)
        self._num_rollouts = 0

    async def rollout(self, task: Task, policy: Policy) -> Score:
        score = await super().rollout(task, policy)
        if task.id.startswith("train"):
            self._num_rollouts += 1
            if self._num_rollouts % 10 == 0:
                raise ZeroDivisionError("the tenth rollout")
        return score


class FailsOnSomeTasks(Digits):
    """The rollouts of every tenth task fail, after the policy has answered: always the same tasks, in every split."""

    name = "fails-on-some-tasks"

    async def rollout(self, task: Task, policy: Policy) -> Score:
        score = await super().rollout(task, policy)
        if zlib.crc32(task.id.encode()) % 10 == 0:
            try:
                raise KeyError(task.id)
            except KeyError as error:
                raise ValueError("the judge does not know the task") from error
        return score


class Leaves(Digits):
    """The first rollout of training ends the orchestrator as if all were well (the launcher plays a few itself)."""

    name = "leaves"

    async def rollout(self, task: Task, policy: Policy) -> Score:
        if task.id.startswith("train") and "orchestrate" in sys.argv:
            os._exit(0)
        return await super().rollout(task, policy)
