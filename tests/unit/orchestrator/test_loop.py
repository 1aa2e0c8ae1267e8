from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from latepix.config.schema import EvalConfig, InferenceConfig, ModelConfig, RunConfig
from latepix.environments.base import Split
from latepix.errors import ConfigError
from latepix.orchestrator.loop import Orchestrator, run_orchestrator


class Measured(Orchestrator):
    """An orchestrator that notes the policy versions it would evaluate."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.measured: list[int] = []

    async def _measure(self, area: str, split: Split) -> None:
        self.measured.append(self.policy_version)


def make_config(model: Path, out: Path, *, every_steps: int = 20, port: int = 1) -> RunConfig:
    return RunConfig(
        output_dir=out,
        model=ModelConfig(path=model),
        inference=InferenceConfig(port=port),
        eval=EvalConfig(every_steps=every_steps),
    )


@pytest.mark.parametrize(("every_steps", "expected"), [(0, [0, 5]), (2, [0, 2, 4, 5])])
def test_evaluations_are_due(tiny_model: Path, tmp_path: Path, every_steps: int, expected: list[int]) -> None:
    async def main() -> list[int]:
        orchestrator = Measured(make_config(tiny_model, tmp_path, every_steps=every_steps))
        for version in range(6):
            orchestrator.policy_version = version
            await orchestrator._eval_if_due(is_last=version == 5)
        orchestrator.metrics.close()
        return orchestrator.measured

    assert asyncio.run(main()) == expected


def test_an_orchestrator_alone_needs_the_port_of_a_server(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^inference.port: got 0, wanted the port of a server that runs"):
        run_orchestrator(make_config(tiny_model, tmp_path, port=0))
