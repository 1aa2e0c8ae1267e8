"""Both servers, held to one contract."""

from __future__ import annotations

import pytest

from tests.tiny.running import RunningServer


@pytest.fixture(params=["local", pytest.param("vllm", marks=pytest.mark.vllm)])
def server(request: pytest.FixtureRequest) -> RunningServer:
    """Return one of the two, serving the weights it was started with."""
    running: RunningServer = request.getfixturevalue(f"{request.param}_server")
    running.reset()
    return running
