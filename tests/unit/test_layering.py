"""Heavy imports stay at the edge, and every module imports only what lies below it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import latepix

HEAVY = ("torch", "transformers", "vllm", "verifiers")

# A package stands for every module in it.
LIGHT = (
    "latepix",
    "latepix.errors",
    "latepix.metrics",
    "latepix.config",
    "latepix.trace",
    "latepix.processes",
    "latepix.runs",
    "latepix.transport",
    "latepix.families.model_info",
    "latepix.families.registry",
    "latepix.environments",
    "latepix.inference.canary",
    "latepix.inference.client",
    "latepix.inference.contract",
    "latepix.inference.control",
    "latepix.inference.facts",
    "latepix.inference.http",
    "latepix.inference.render",
    "latepix.inference.vllm",
    "latepix.orchestrator",
    "latepix.report",
    "latepix.launcher",
    "latepix.budget",
    "latepix.replay",
    "latepix.cli",
)

# What each room may import beside itself: the tiers of STYLE, section 3. Rooms are packages and top-level modules, and
# the modules of `inference` that are no part of a server. `runs` and `processes` are helpers of the actors: they lie
# below them. The commands (`ABOVE`) lie above everything.
SHARED = {"errors", "metrics", "trace", "config"}
CLIENT = {
    f"inference.{name}"
    for name in ("canary", "client", "contract", "control", "facts", "http", "qwen25_renderer", "render")
}
TOOLS = {"families", "transport", *CLIENT}
HELPERS = {"runs", "processes"}
BELOW = {
    "errors": set(),
    "torchvision_stubs": set(),
    "metrics": {"errors"},
    "trace": {"errors"},
    "config": {"errors"},
    "families": SHARED | TOOLS,
    "transport": SHARED | TOOLS,
    **{name: SHARED | TOOLS for name in CLIENT},
    "runs": SHARED | TOOLS,
    "processes": SHARED,
    "environments": SHARED | TOOLS | HELPERS,
    "inference": SHARED | TOOLS | HELPERS,
    "orchestrator": SHARED | TOOLS | HELPERS | {"environments"},
    "trainer": SHARED | TOOLS | HELPERS,
    "report": SHARED,
}
ABOVE = {"__main__", "cli", "launcher", "serve", "sft", "parity", "budget", "replay"}

# Runs in a fresh interpreter: what this one has loaded says nothing. The top package alone is imported without its
# modules, which are of every tier.
PROBE = """
import importlib, pkgutil, sys
name, heavy = sys.argv[1], sys.argv[2:]
module = importlib.import_module(name)
if name != "latepix":
    for inner in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        importlib.import_module(inner.name)
print(*sorted(set(heavy) & sys.modules.keys()))
"""


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_import_nothing_heavy(name: str) -> None:
    command = [sys.executable, "-c", PROBE, name, *HEAVY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def room_of(module: str) -> str:
    """Return the room of a module named below `latepix`."""
    return module if module in CLIENT else module.partition(".")[0]


def imports_of(path: Path) -> Iterator[str]:
    """Yield the modules of latepix that a file imports, anywhere in it, named below `latepix`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from latepix.inference import client` names a module too.
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name.removeprefix("latepix.") for name in names if name.startswith("latepix."))


def source_files() -> list[tuple[str, Path]]:
    """Return every module of latepix, named below `latepix`, and its file."""
    root = Path(str(latepix.__file__)).parent
    files = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            files.append((name, path))
    return files


@pytest.mark.parametrize(("module", "path"), source_files(), ids=[name for name, _ in source_files()])
def test_a_module_imports_only_what_lies_below_it(module: str, path: Path) -> None:
    known = {name for name, _ in source_files()}
    imported = known.intersection(imports_of(path))
    room = room_of(module)
    if room in BELOW:
        wrong = {name for name in imported if room_of(name) not in BELOW[room] | {room}}
        assert not wrong, f"{module} ({room}) must not import {sorted(wrong)}"
    elif module != "__main__":
        assert "cli" not in imported


def test_every_room_has_its_place() -> None:
    assert {room_of(name) for name, _ in source_files()} <= BELOW.keys() | ABOVE
