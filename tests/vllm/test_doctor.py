"""`latepix doctor` against a real vLLM: every picture and every conversation, to the last bit that matters."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from latepix.config.schema import DoctorConfig
from latepix.parity.doctor import run_doctor

pytestmark = pytest.mark.vllm


def test_every_case_agrees(vllm_server: Any, tmp_path: Path) -> None:
    with urllib.request.urlopen(f"{vllm_server.base_url}/latepix/facts", timeout=60) as answer:
        facts = json.load(answer)
    config = DoctorConfig.model_validate(
        {
            "output_dir": tmp_path,
            "model": {"path": vllm_server.model},
            "inference": {"engine": "vllm", "url": vllm_server.base_url, "max_model_len": facts["max_model_len"]},
            "images": {"max_per_prompt": facts["mm_limits"]["image"]},
        }
    )
    status = run_doctor(config)
    page = (tmp_path / "doctor" / "doctor.md").read_text()
    assert status == 0, page
    found = json.loads((tmp_path / "doctor" / "doctor.json").read_text())
    assert found["has_pixels"]
    assert found["largest_pixel_difference"] <= 1e-5
    wrong = [row["name"] for row in found["rows"] if row["status"] not in ("ok", "refused", "too long")]
    assert wrong == []
    assert sum(row["status"] == "ok" for row in found["rows"]) >= 40
    assert all(
        row["max_pixel_difference"] is not None for row in found["rows"] if row["status"] == "ok" and row["sizes"]
    )
