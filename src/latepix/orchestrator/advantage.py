"""Rewards of a group -> advantages. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from latepix.config.schema import AdvantageType
from latepix.errors import RolloutError

#: Keeps the division finite; the same constant as in the recipe the demo was measured with.
_STD_FLOOR = 1e-4


def group_advantages(rewards_G: Sequence[float], *, kind: AdvantageType) -> list[float]:
    """Compare the rewards of one group with each other. With m the mean and d_i = reward_i - m:

        grpo      d_i / (std + 1e-4)        std over the group's G rewards
        dr_grpo   d_i
        rloo      d_i * G / (G - 1)         = reward_i less the mean of the others
        max       d_i / max_j |d_j|         in [-1, 1], whatever the rewards' scale and spread

    A group whose rewards are all equal gets zeros: it carries no gradient.

    Args:
        rewards_G: [G] one scalar per sibling rollout, finite, in the environment's units.
        kind: which of the above.
    Returns:
        [G] advantages in the order of `rewards_G`; they sum to 0 up to rounding.
    Raises:
        RolloutError: a reward is NaN or infinite (names the index).
    Source: grpo: DeepSeekMath, arXiv:2402.03300, section 4.1.2; dr_grpo: arXiv:2503.20783; rloo: arXiv:2402.14740,
        section 3; max: our own, for rewards whose scale is not known.
    """
    for index, reward in enumerate(rewards_G):
        if not math.isfinite(reward):
            raise RolloutError(f"Reward {index} of the group is {reward}; rewards must be finite numbers.")
    if len(set(rewards_G)) < 2:
        return [0.0] * len(rewards_G)
    mean = sum(rewards_G) / len(rewards_G)
    centered = [reward - mean for reward in rewards_G]
    return [value / _scale(centered, kind) for value in centered]


def _scale(centered: Sequence[float], kind: AdvantageType) -> float:
    if kind == "grpo":
        return math.sqrt(sum(value * value for value in centered) / len(centered)) + _STD_FLOOR
    if kind == "rloo":
        return (len(centered) - 1) / len(centered)
    if kind == "max":
        return max(map(abs, centered))
    return 1.0
