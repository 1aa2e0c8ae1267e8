"""Fixtures that several folders of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from latepix.families.model_info import ModelInfo, read_model_info
from latepix.families.tiny import make_tiny
from latepix.inference.render import MessageRenderer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny random Qwen3-VL folder, made once per test session; nobody writes to it."""
    return make_tiny("qwen3_vl", tmp_path_factory.mktemp("models") / "tiny-qwen3-vl", seed=0)


@pytest.fixture(scope="session")
def info(tiny_model: Path) -> ModelInfo:
    """Return the facts of the tiny model's folder."""
    return read_model_info(tiny_model)


@pytest.fixture(scope="session")
def renderer(info: ModelInfo) -> MessageRenderer:
    """Return the renderer of the tiny model."""
    return MessageRenderer(info)
