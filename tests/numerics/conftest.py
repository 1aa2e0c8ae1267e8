"""Sharpened tiny models of every family, made when a test asks for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from latepix.families.tiny import make_tiny
from tests.tiny.policy import Policy, load_policy, sharpen


@pytest.fixture(scope="session")
def sharp_family(sharp_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function of the family that returns its sharpened folder; nobody writes to it."""

    @cache
    def make(family: str) -> Path:
        if family == "qwen3_vl":
            return sharp_model
        folder = tmp_path_factory.mktemp(family)
        return sharpen(make_tiny(family, folder / "tiny"), folder / "sharp")

    return make


@pytest.fixture(scope="session")
def family_policy(sharp_family: Callable[[str], Path]) -> Callable[[str], Policy]:
    """Return a function of the family that returns its sharpened model as the trainer holds it."""
    return cache(lambda family: load_policy(sharp_family(family)))
