"""Fixtures that several folders of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from latepix.families.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny random Qwen3-VL folder, made once per test session; nobody writes to it."""
    return make_tiny("qwen3_vl", tmp_path_factory.mktemp("models") / "tiny-qwen3-vl", seed=0)
