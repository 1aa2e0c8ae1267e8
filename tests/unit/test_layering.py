"""Heavy imports stay at the edge: these modules load neither torch nor transformers nor vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "vllm")

# A package stands for every module in it.
LIGHT = (
    "latepix",
    "latepix.errors",
    "latepix.metrics",
    "latepix.config",
    "latepix.trace",
)

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
