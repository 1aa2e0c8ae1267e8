from __future__ import annotations

import math

import pytest

from latepix.errors import RolloutError
from latepix.orchestrator.advantage import group_advantages


def test_rewards_are_centered_on_the_groups_mean() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 3.0], scale_by_std=False) == [0.0, -1.0, -1.0, 2.0]


def test_scaling_divides_by_the_population_deviation() -> None:
    # Mean 1, squares 0 + 1 + 1 + 4 = 6, deviation sqrt(6 / 4).
    std = math.sqrt(1.5) + 1e-4
    assert group_advantages([1.0, 0.0, 0.0, 3.0], scale_by_std=True) == [0.0, -1 / std, -1 / std, 2 / std]


@pytest.mark.parametrize("scale_by_std", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0, -3.5])
def test_equal_rewards_give_zeros(reward: float, scale_by_std: bool) -> None:
    assert group_advantages([reward] * 4, scale_by_std=scale_by_std) == [0.0] * 4


@pytest.mark.parametrize("scale_by_std", [True, False])
def test_small_groups_have_nothing_to_compare(scale_by_std: bool) -> None:
    assert group_advantages([], scale_by_std=scale_by_std) == []
    assert group_advantages([5.0], scale_by_std=scale_by_std) == [0.0]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named(reward: float) -> None:
    with pytest.raises(RolloutError, match=rf"Reward 2 of the group is {reward}"):
        group_advantages([0.0, 1.0, reward], scale_by_std=True)
