"""Environments that go wrong, to be named in a config as `tests.tiny.environments:Class`."""

from __future__ import annotations

from latepix.config.schema import EnvironmentConfig
from latepix.environments.base import Ingest, Policy, Score, Task
from latepix.environments.digits import Digits


class AlwaysRaises(Digits):
    """Every rollout fails."""

    name = "always-raises"

    async def rollout(self, task: Task, policy: Policy) -> Score:
        raise ZeroDivisionError(f"the simulator of {task.id} is out of order")


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
