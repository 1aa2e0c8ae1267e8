"""`latepix doctor` with the local engine: an honest server passes, one with other settings is caught and shown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latepix.config.schema import DoctorConfig, RunConfig
from latepix.launcher import inference_server
from latepix.parity.doctor import run_doctor

pytestmark = pytest.mark.slow

PICTURES = ("png_rgba", "jpeg_exif_6", "noise", "above_max_pixels", "one_pixel")


def examine(model: Path, folder: Path, **sections: Any) -> tuple[int, dict[str, Any], dict[str, dict[str, Any]]]:
    """Run the doctor; returns its status, `doctor.json`, and its rows by name."""
    config = DoctorConfig.model_validate({"output_dir": folder, "model": {"path": model}, **sections})
    status = run_doctor(config)
    found = json.loads((folder / "doctor" / "doctor.json").read_text())
    return status, found, {row["name"]: row for row in found["rows"]}


def changed_copy(model: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Copy a model folder and change the settings of its image processor."""
    shutil.copytree(model, folder)
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("fit", [True, False])
def test_an_honest_server_agrees_in_everything(fit: bool, tiny_model: Path, tmp_path: Path) -> None:
    status, found, rows = examine(tiny_model, tmp_path, images={"fit": fit})
    assert status == 0, (tmp_path / "doctor" / "doctor.md").read_text()
    assert (found["is_ok"], found["has_pixels"], found["differences"]) == (True, True, [])
    assert found["largest_pixel_difference"] <= 1e-5
    assert {row["status"] for row in rows.values()} == {"ok", "refused"}
    assert {name for name, row in rows.items() if row["status"] == "refused"} == {
        "cut_jpeg",
        "web_page",
        "system_picture",
    }
    assert all(row["max_pixel_difference"] is not None for row in rows.values() if row["sizes"])
    assert rows["one_pixel"]["sizes"] == ([[32, 32]] if fit else [[1, 1]])
    assert rows["one_pixel"]["grids"] == [[1, 2, 2]]
    # The folder of a run is left alone: the server's config and log lie beside the findings.
    assert [path.name for path in tmp_path.iterdir()] == ["doctor"]


def test_a_server_with_other_pixel_limits_is_caught(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {"shortest_edge": 64 * 64, "longest_edge": 512 * 512}
    other = changed_copy(tiny_model, tmp_path / "other", lambda settings: settings.update(size=limits))
    served = RunConfig.model_validate({"output_dir": tmp_path / "served", "model": {"path": other}})
    with inference_server(served) as url:
        status, found, rows = examine(tiny_model, tmp_path / "out", inference={"url": url}, images={"fit": False})
    assert status == 1
    fatal = {one["setting"]: one for one in found["differences"] if one["is_fatal"]}
    assert fatal.keys() == {"image processor: fewest pixels", "image processor: most pixels"}
    wrong = {name for name, row in rows.items() if row["status"] == "failed"}
    assert wrong == {"one_pixel", "tiny", "at_min_pixels", "at_max_pixels", "above_max_pixels"}
    assert {one["kind"] for one in rows["one_pixel"]["mismatches"]} >= {"places", "grid"}
    assert rows["one_pixel"]["mismatches"][0] == {
        "kind": "places",
        "what": "placeholder tokens",
        "server": "4",
        "trainer": "1",
    }
    assert "decoded size: server 512 x 512 pixels, trainer 1024 x 1024 pixels" in capsys.readouterr().out


def test_a_server_with_another_mean_is_caught_by_its_pixels(tiny_model: Path, tmp_path: Path) -> None:
    other = changed_copy(tiny_model, tmp_path / "other", lambda one: one.update(image_mean=[0.5, 0.5, 0.4]))
    served = RunConfig.model_validate({"output_dir": tmp_path / "served", "model": {"path": other}})
    with inference_server(served) as url:
        status, found, rows = examine(tiny_model, tmp_path / "out", inference={"url": url})
    assert status == 1
    assert found["largest_pixel_difference"] == pytest.approx(0.2, abs=1e-6)
    for name in PICTURES:
        assert [one["kind"] for one in rows[name]["mismatches"]] == ["pixels"], name
    assert rows["text_only"]["status"] == "ok"
    # As many as there are with pictures, and the setting itself.
    assert found["num_failed"] == 1 + sum(bool(row["sizes"]) for row in rows.values())
