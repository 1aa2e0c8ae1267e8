"""A tiny policy with peaked answers, loaded once for all equalities."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny.policy import Policy, load_policy, sharpen


@pytest.fixture(scope="session")
def sharp_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a sharpened tiny model."""
    return sharpen(tiny_model, tmp_path_factory.mktemp("models") / "sharp")


@pytest.fixture(scope="session")
def policy(sharp_model: Path) -> Policy:
    """Return the sharpened model as the trainer holds it; nobody changes its weights."""
    return load_policy(sharp_model)
