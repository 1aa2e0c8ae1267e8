"""Fixtures of the orchestrator's tests."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def vf() -> Any:
    """Return the real `verifiers.v1`; importing it takes seconds, so nothing else does."""
    import verifiers.v1

    return verifiers.v1
