"""Every other family through a real vLLM on the CPU, in float32: before an update and after it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from latepix.families.tiny import TINY_FAMILIES
from latepix.parity.kl import run_parity
from tests.integration.test_parity import config_of, means_of
from tests.tiny.running import VLLM_PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
STEPS, BATCH = 2, 16


@pytest.mark.parametrize("family", [family for family in TINY_FAMILIES if family != "qwen3_vl"])
def test_vllm_and_trainer_agree(family: str, sharp_family: Callable[[str], Path], tmp_path: Path) -> None:
    config = config_of(
        sharp_family(family),
        tmp_path / "run",
        *("--inference.engine", "vllm", "--inference.vllm.python", VLLM_PYTHON, "--inference.max_model_len", 512),
        *("--parity.steps", STEPS, "--parity.batch", BATCH),
    )
    assert run_parity(config) == 0
    result = json.loads((tmp_path / "run" / "parity.json").read_text())
    assert max(means_of(result)) < 1e-6
    assert result["num_updates_shown"] == STEPS - 1
