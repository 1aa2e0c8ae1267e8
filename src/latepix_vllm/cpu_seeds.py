"""Keeps vLLM on a CPU alive when a prompt is computed in pieces and its request has a seed.

Sampling runs for every row of a batch, also for one whose prompt is not at its end yet; its token is thrown away, and
the request's generator has to go back to where it was, or the answer to a seed would depend on what else was in the
batch. vLLM (0.28 to 0.32) moves the generator's offset back, which exists on a GPU only: on a CPU the engine dies with
"CPU Generator does not use offset". Many long prompts at once do it, and so does every weight update with requests in
flight, since their prompts are computed anew. Here the generator's state is kept and put back instead.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


def install(runner_class: Any) -> None:
    """Mend a model runner's class; any number of times."""
    if getattr(runner_class, "_latepix_seeds", False):
        return
    runner_class._latepix_seeds = True
    sample, bookkeeping = runner_class._sample, runner_class._bookkeeping_sync

    @functools.wraps(sample)
    def sample_and_take_back(self: Any, *args: Any, **kwargs: Any) -> Any:
        unfinished = _unfinished(self)
        states = {row: generator.get_state() for row, generator in unfinished.items()}
        output = sample(self, *args, **kwargs)
        for row, generator in unfinished.items():
            generator.set_state(states[row])
        return output

    @functools.wraps(bookkeeping)
    def bookkeeping_without_offsets(self: Any, *args: Any, **kwargs: Any) -> Any:
        unfinished = _unfinished(self)
        generators = self.input_batch.generators
        for row in unfinished:
            # Out of sight: what is to be undone is undone already.
            del generators[row]
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            generators.update(unfinished)

    runner_class._sample = sample_and_take_back
    runner_class._bookkeeping_sync = bookkeeping_without_offsets


def _unfinished(runner: Any) -> dict[int, Any]:
    """Return the generators of rows whose sampled token is thrown away, by row."""
    batch = runner.input_batch
    rows = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs])
    return {int(row): batch.generators[int(row)] for row in rows if int(row) in batch.generators}
