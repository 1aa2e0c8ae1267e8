"""The plugin stands alone: it imports nothing of latepix, nothing heavy at first, and its entry points exist."""

from __future__ import annotations

import ast
import multiprocessing
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import latepix_vllm
from latepix_vllm import compat

FOLDER = Path(latepix_vllm.__file__).parent
MODULES = sorted(FOLDER.glob("*.py"))


def imported(module: Path) -> set[str]:
    """Return the top packages that a module imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.name} has a relative import"
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_nothing_of_latepix_is_imported(module: Path) -> None:
    assert "latepix" not in imported(module)


def test_importing_the_plugin_loads_nothing_heavy() -> None:
    probe = "import sys, latepix_vllm, latepix_vllm.compat; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.split()
    assert not {"latepix", "torch", "vllm", "safetensors", "fastapi", "numpy"} & set(loaded)


def test_the_distribution_declares_entry_points_that_exist() -> None:
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "latepix-vllm"
    assert project["dependencies"] == []
    assert project["entry-points"] == {
        "vllm.general_plugins": {"latepix": "latepix_vllm:register"},
        "vllm.endpoint_plugins": {"latepix": "latepix_vllm.endpoint:LatepixEndpoint"},
    }
    assert callable(latepix_vllm.register)
    tree = ast.parse((FOLDER / "endpoint.py").read_text(encoding="utf-8"))
    assert "LatepixEndpoint" in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


class FakeFactory:
    """Like vLLM's: refuses to register a name twice."""

    def __init__(self) -> None:
        self._registry: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, class_name: str) -> None:
        assert name not in self._registry
        self._registry[name] = (module, class_name)


def make_runner_class() -> Any:
    """Build a class like vLLM's CPU model runner: it has the two methods that are mended."""

    class Runner:
        def _sample(self) -> None:
            """Sample."""

        def _bookkeeping_sync(self) -> None:
            """Keep books."""

    return Runner


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> FakeFactory:
    """Return the factory of a vLLM that runs its models on a GPU."""
    factory = FakeFactory()
    monkeypatch.setattr(compat, "weight_transfer_factory", lambda: factory)
    monkeypatch.setattr(compat, "is_cpu", lambda: False)
    return factory


def play_cpu(monkeypatch: pytest.MonkeyPatch, *, is_child: bool) -> Any:
    """Play a vLLM that runs its models on a CPU; returns the class of its model runner."""
    runner_class = make_runner_class()
    monkeypatch.setattr(compat, "is_cpu", lambda: True)
    monkeypatch.setattr(compat, "cpu_model_runner", lambda: runner_class)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object() if is_child else None)
    return runner_class


def test_registering_twice_registers_once(factory: FakeFactory) -> None:
    latepix_vllm.register()
    latepix_vllm.register()
    assert factory._registry == {"safetensors_dir": ("latepix_vllm.weights", "SafetensorsDirEngine")}


@pytest.mark.parametrize("is_child", [True, False])
def test_only_processes_that_run_a_model_on_a_cpu_are_mended(
    factory: FakeFactory, monkeypatch: pytest.MonkeyPatch, is_child: bool
) -> None:
    runner_class = play_cpu(monkeypatch, is_child=is_child)
    sample = runner_class._sample
    latepix_vllm.register()
    assert (runner_class._sample is not sample) is is_child


def test_only_what_is_there_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = type(sys)("vllm.model_executor.layers.rotary_embedding.base")
    module.RotaryEmbedding = type("RotaryEmbedding", (), {"forward_cpu": lambda self: None})
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.rotary_embedding.base", module)
    for parent in (
        "vllm",
        "vllm.model_executor",
        "vllm.model_executor.layers",
        "vllm.model_executor.layers.rotary_embedding",
    ):
        package: Any = type(sys)(parent)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, parent, package)
    assert compat.rotary_embedding() is module.RotaryEmbedding
    assert compat.fused_moe_method() is None
    assert compat.cpu_delta_net() is None
    del module.RotaryEmbedding.forward_cpu
    assert compat.rotary_embedding() is None


def test_an_unknown_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm: Any = type(sys)("vllm")
    vllm.__version__ = "0.99.0"
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    with pytest.raises(compat.UnknownVllm, match=r"vLLM 0\.99\.0 has none of vllm\.distributed"):
        compat.weight_transfer_factory()
