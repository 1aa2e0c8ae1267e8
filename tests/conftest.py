"""Fixtures that several folders of tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from latepix.families.model_info import ModelInfo, read_model_info
from latepix.families.tiny import make_tiny
from latepix.inference.render import MessageRenderer
from tests.tiny.policy import Policy, load_policy, sharpen
from tests.tiny.running import RunningServer, run_server


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


@pytest.fixture(scope="session")
def sharp_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a sharpened tiny model: its answers are peaked and depend on the pictures."""
    return sharpen(tiny_model, tmp_path_factory.mktemp("models") / "sharp")


@pytest.fixture(scope="session")
def policy(sharp_model: Path) -> Policy:
    """Return the sharpened model as the trainer holds it; nobody changes its weights."""
    return load_policy(sharp_model)


@pytest.fixture(scope="session")
def local_server(sharp_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Return a running local engine with the sharpened model, as `latepix serve` starts it."""
    with run_server("local", sharp_model, tmp_path_factory.mktemp("local-server")) as running:
        yield running


@pytest.fixture(scope="session")
def vllm_server(sharp_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Return a running vLLM with the sharpened model: one for the whole test run, since it takes a minute to start."""
    with run_server("vllm", sharp_model, tmp_path_factory.mktemp("vllm-server")) as running:
        yield running


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
