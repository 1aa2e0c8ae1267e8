"""Generators of requests whose prompt is not at its end, on a stand-in for vLLM's CPU model runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from latepix_vllm import cpu_seeds


def make_runner_class() -> Any:
    """Build a class as vLLM's is: samples every row, then takes the draw of unfinished rows back by the offset."""

    class Runner:
        def __init__(self, *, unfinished: list[bool], seeded: list[bool] | None = None) -> None:
            rows = range(len(unfinished))
            generators = {row: torch.Generator().manual_seed(row) for row in rows if seeded is None or seeded[row]}
            self.input_batch = SimpleNamespace(num_reqs=len(unfinished), generators=generators)
            # vLLM's mask is as long as the largest batch; what lies behind the requests is of an earlier one.
            self.discard_request_mask = SimpleNamespace(np=np.array([*unfinished, True, True]))
            self.seen: list[list[int]] = []
            self.is_broken = False

        def _sample(self, logits: torch.Tensor, scale: float = 1.0) -> dict[int, float]:
            """Draw one number for each row."""
            generators = self.input_batch.generators
            return {row: scale * float(torch.rand((), generator=one)) for row, one in generators.items()}

        def _bookkeeping_sync(self, output: dict[int, float], *, more: int = 0) -> tuple[dict[int, float], int]:
            self.seen.append(sorted(self.input_batch.generators))
            if self.is_broken:
                raise RuntimeError("bookkeeping failed")
            for row in np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]):
                generator = self.input_batch.generators.get(int(row))
                if generator is not None:
                    generator.set_offset(generator.get_offset() - 4)
            return output, more

    return Runner


def make_runner(*, unfinished: list[bool], seeded: list[bool] | None = None) -> Any:
    runner_class = make_runner_class()
    cpu_seeds.install(runner_class)
    return runner_class(unfinished=unfinished, seeded=seeded)


def step(runner: Any) -> dict[int, float]:
    """Sample once, as the engine does."""
    output = runner._sample(None)
    runner._bookkeeping_sync(output)
    return output


def draws(seed: int, count: int) -> list[float]:
    """Return what a generator draws that nothing happens to."""
    generator = torch.Generator().manual_seed(seed)
    return [float(torch.rand((), generator=generator)) for _ in range(count)]


def test_without_it_an_unfinished_row_ends_the_engine() -> None:
    runner = make_runner_class()(unfinished=[True])
    with pytest.raises(RuntimeError, match="does not use offset"):
        step(runner)


def test_an_unfinished_row_draws_the_same_number_again() -> None:
    runner = make_runner(unfinished=[True, False])
    assert [step(runner)[0] for _ in range(3)] == draws(0, 1) * 3


def test_a_finished_row_goes_on() -> None:
    runner = make_runner(unfinished=[True, False])
    assert [step(runner)[1] for _ in range(3)] == draws(1, 3)


def test_a_row_goes_on_once_its_prompt_is_at_its_end() -> None:
    runner = make_runner(unfinished=[True, False])
    got = [step(runner)[0]]
    runner.discard_request_mask.np[0] = False
    got += [step(runner)[0] for _ in range(2)]
    first, second = draws(0, 2)
    assert got == [first, first, second]


def test_unfinished_rows_are_out_of_sight_in_bookkeeping_and_back_afterwards() -> None:
    runner = make_runner(unfinished=[True, False, True])
    before = dict(runner.input_batch.generators)
    step(runner)
    assert runner.seen == [[1]]
    assert runner.input_batch.generators == before


def test_generators_come_back_when_bookkeeping_fails() -> None:
    runner = make_runner(unfinished=[True, False])
    before = dict(runner.input_batch.generators)
    runner.is_broken = True
    with pytest.raises(RuntimeError, match="bookkeeping failed"):
        step(runner)
    assert runner.input_batch.generators == before


def test_a_row_without_a_seed_has_no_generator_to_put_back() -> None:
    runner = make_runner(unfinished=[True, True, False], seeded=[False, True, False])
    assert [step(runner) for _ in range(2)] == [{1: draws(1, 1)[0]}] * 2
    assert sorted(runner.input_batch.generators) == [1]


def test_marks_behind_the_last_request_are_not_looked_at() -> None:
    runner = make_runner(unfinished=[False])
    runner.input_batch.generators[1] = torch.Generator().manual_seed(1)
    assert [step(runner)[1] for _ in range(2)] == draws(1, 2)


def test_arguments_and_results_pass_through() -> None:
    runner = make_runner(unfinished=[False])
    output = runner._sample(None, scale=2.0)
    assert output == {0: 2 * draws(0, 1)[0]}
    assert runner._bookkeeping_sync(output, more=7) == (output, 7)


def test_installing_twice_wraps_once() -> None:
    runner_class = make_runner_class()
    cpu_seeds.install(runner_class)
    methods = runner_class._sample, runner_class._bookkeeping_sync
    cpu_seeds.install(runner_class)
    assert (runner_class._sample, runner_class._bookkeeping_sync) == methods
    assert runner_class._sample.__doc__ == "Draw one number for each row."
