from __future__ import annotations

import math
from typing import get_args

import pytest

from latepix.config.schema import AdvantageType
from latepix.errors import RolloutError
from latepix.orchestrator.advantage import group_advantages


def test_rewards_are_centered_on_the_groups_mean() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 3.0], kind="dr_grpo") == [0.0, -1.0, -1.0, 2.0]


def test_scaling_divides_by_the_population_deviation() -> None:
    # Mean 1, squares 0 + 1 + 1 + 4 = 6, deviation sqrt(6 / 4).
    std = math.sqrt(1.5) + 1e-4
    assert group_advantages([1.0, 0.0, 0.0, 3.0], kind="grpo") == [0.0, -1 / std, -1 / std, 2 / std]


def test_leave_one_out_compares_with_the_others_mean() -> None:
    rewards = [1.0, 0.0, 0.0, 3.0]
    wanted = [reward - (sum(rewards) - reward) / 3 for reward in rewards]
    assert group_advantages(rewards, kind="rloo") == pytest.approx(wanted, rel=1e-12)


def test_max_brings_every_group_to_one() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 3.0], kind="max") == [0.0, -0.5, -0.5, 1.0]
    assert group_advantages([1e9, 0.0], kind="max") == [1.0, -1.0]


@pytest.mark.parametrize("kind", get_args(AdvantageType))
def test_advantages_of_a_group_sum_to_zero(kind: AdvantageType) -> None:
    assert sum(group_advantages([0.3, 2.0, -1.0, 0.5, 0.5], kind=kind)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("kind", get_args(AdvantageType))
@pytest.mark.parametrize("reward", [0.0, 1.0, -3.5])
def test_equal_rewards_give_zeros(reward: float, kind: AdvantageType) -> None:
    assert group_advantages([reward] * 4, kind=kind) == [0.0] * 4


@pytest.mark.parametrize("kind", get_args(AdvantageType))
def test_small_groups_have_nothing_to_compare(kind: AdvantageType) -> None:
    assert group_advantages([], kind=kind) == []
    assert group_advantages([5.0], kind=kind) == [0.0]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named(reward: float) -> None:
    with pytest.raises(RolloutError, match=rf"Reward 2 of the group is {reward}"):
        group_advantages([0.0, 1.0, reward], kind="grpo")
