"""Rewards of a group -> advantages. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from latepix.errors import RolloutError

#: Keeps the division finite; the same constant as in the recipe the demo was measured with.
_STD_FLOOR = 1e-4


def group_advantages(rewards_G: Sequence[float], *, scale_by_std: bool) -> list[float]:
    """Center the rewards of one group on their mean.

    A group whose rewards are all equal gets zeros: it carries no gradient.

    Args:
        rewards_G: [G] one scalar per sibling rollout, finite, in the environment's units.
        scale_by_std: divide by the population standard deviation (GRPO); off = Dr. GRPO.
    Returns:
        [G] advantages in the order of `rewards_G`; they sum to 0 up to rounding.
    Raises:
        RolloutError: a reward is NaN or infinite (names the index).
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2; without the deviation: arXiv:2503.20783.
    """
    for index, reward in enumerate(rewards_G):
        if not math.isfinite(reward):
            raise RolloutError(f"Reward {index} of the group is {reward}; rewards must be finite numbers.")
    if not rewards_G:
        return []
    mean = sum(rewards_G) / len(rewards_G)
    centered = [reward - mean for reward in rewards_G]
    if not scale_by_std:
        return centered
    std = math.sqrt(sum(value * value for value in centered) / len(centered))
    return [value / (std + _STD_FLOOR) for value in centered]
