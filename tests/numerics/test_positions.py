"""Our MRoPE positions = Hugging Face's `get_rope_index`. They are integers: equal, or wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from latepix.errors import PlaceholderMismatch
from tests.tiny.policy import Policy

Grid = tuple[int, int, int]


def types_of(*parts: int | Grid) -> np.ndarray:
    """Return token types of text runs (their length) and pictures (their grid, merge 2)."""
    return np.concatenate(
        [
            np.zeros(part, np.uint8) if isinstance(part, int) else np.ones(part[0] * part[1] * part[2] // 4, np.uint8)
            for part in parts
        ]
    )


def grids_of(*parts: int | Grid) -> list[Grid]:
    return [part for part in parts if not isinstance(part, int)]


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((7,), id="text only"),
        pytest.param((5, (1, 2, 2), 4), id="one token"),
        pytest.param(((1, 4, 6), 3), id="picture first"),
        pytest.param((3, (1, 6, 4)), id="picture last"),
        pytest.param(((1, 2, 8),), id="picture only"),
        pytest.param((2, (1, 4, 4), 1, (1, 2, 10), 6, (1, 8, 2), 2), id="several grids"),
        pytest.param((1, (1, 4, 4), 1, (1, 4, 4), 1), id="the same grid twice"),
        pytest.param((2, (2, 4, 4), 3), id="two frames"),
    ],
)
def test_positions_equal_get_rope_index(policy: Policy, parts: tuple[int | Grid, ...]) -> None:
    types, grids = types_of(*parts), grids_of(*parts)
    model: Any = policy.model
    wanted, _ = model.model.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.long),
        mm_token_type_ids=torch.from_numpy(types)[None],
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    ours = policy.adapter.position_ids(types, grids, policy.info)
    assert ours.dtype == np.int64
    np.testing.assert_array_equal(ours, wanted[:, 0].numpy())


def test_random_prompts_equal_get_rope_index(policy: Policy) -> None:
    rng = np.random.default_rng(0)
    model: Any = policy.model
    for _ in range(50):
        parts: list[int | Grid] = [int(rng.integers(1, 6))]
        for _ in range(int(rng.integers(1, 5))):
            parts += [(1, 2 * int(rng.integers(1, 6)), 2 * int(rng.integers(1, 6))), int(rng.integers(1, 6))]
        types, grids = types_of(*parts), grids_of(*parts)
        wanted, _ = model.model.get_rope_index(
            torch.zeros(1, len(types), dtype=torch.long),
            mm_token_type_ids=torch.from_numpy(types)[None],
            image_grid_thw=torch.tensor(grids),
        )
        np.testing.assert_array_equal(policy.adapter.position_ids(types, grids, policy.info), wanted[:, 0].numpy())


def test_pictures_that_touch_are_told_apart_by_their_grids(policy: Policy) -> None:
    # get_rope_index takes a run for one picture, so this one is worked by hand: the second starts where text would.
    types, grids = types_of(1, (1, 4, 4), (1, 2, 4), 1), [(1, 4, 4), (1, 2, 4)]
    np.testing.assert_array_equal(
        policy.adapter.position_ids(types, grids, policy.info),
        [
            [0, 1, 1, 1, 1, 3, 3, 5],
            [0, 1, 1, 2, 2, 3, 3, 5],
            [0, 1, 2, 1, 2, 3, 4, 5],
        ],
    )


@pytest.mark.parametrize(
    ("types", "grids", "message"),
    [
        pytest.param(types_of(2, (1, 4, 4)), [], "4 picture tokens at 2 have no grid", id="no grid"),
        pytest.param(types_of(2), [(1, 2, 2)], "1 grids, but picture tokens for 0", id="no tokens"),
        pytest.param(types_of(2, (1, 2, 4)), [(1, 4, 4)], "needs 4 tokens, the run has 2", id="too few tokens"),
        pytest.param(types_of((1, 4, 4), 1), [(1, 2, 4)], "2 picture tokens at 2 have no grid", id="too many tokens"),
    ],
)
def test_runs_that_do_not_fit_their_grids_are_refused(
    policy: Policy, types: np.ndarray, grids: list[Grid], message: str
) -> None:
    with pytest.raises(PlaceholderMismatch, match=message):
        policy.adapter.position_ids(types, grids, policy.info)
