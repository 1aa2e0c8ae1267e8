"""Every test that asks for the running vLLM gets it at the weights it was started with."""

from __future__ import annotations

import pytest

from tests.tiny.running import RunningServer


@pytest.fixture(autouse=True)
def _start_at_version_zero(request: pytest.FixtureRequest) -> None:
    if "vllm_server" in request.fixturenames:
        server: RunningServer = request.getfixturevalue("vllm_server")
        server.reset()
