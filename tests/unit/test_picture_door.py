"""Every setting of `images` has its effect behind `picture_door`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from latepix.config.schema import ImagesConfig
from latepix.errors import ImageError
from latepix.families.model_info import ModelInfo
from latepix.runs import picture_door
from latepix.trace.ingress import InlineImage
from tests.tiny.picture_server import Reply, picture_server
from tests.tiny.pictures import draw_picture, encode

DATA = encode(draw_picture(width=70, height=45))


def ingest(source: Any, info: ModelInfo, **settings: Any) -> InlineImage:
    return picture_door(ImagesConfig.model_validate(settings), info)(source)


def reason_of(source: Any, info: ModelInfo, **settings: Any) -> str:
    with pytest.raises(ImageError) as caught:
        ingest(source, info, **settings)
    return caught.value.reason


def test_fit_brings_a_picture_to_the_grid_of_the_model(info: ModelInfo) -> None:
    assert ingest(DATA, info, fit=False).width == 70
    fitted = ingest(DATA, info)
    assert (fitted.width, fitted.height) == info.grid.size(70, 45) != (70, 45)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_bytes": 100}, "too_many_bytes"),
        ({"max_pixels": 70 * 45 - 1}, "too_many_pixels"),
        ({"max_aspect_ratio": 1.5}, "aspect_ratio"),
    ],
)
def test_limits_are_passed_on(info: ModelInfo, settings: dict[str, Any], reason: str) -> None:
    assert reason_of(DATA, info, **settings) == reason


def test_files_and_urls_are_refused_by_default(info: ModelInfo, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(DATA)
    assert reason_of(path, info) == "not_allowed"
    assert reason_of("http://127.0.0.1:1/a.png", info) == "not_allowed"


def test_allow_folders(info: ModelInfo, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(DATA)
    assert ingest(path, info, allow_folders=[str(tmp_path)], fit=False).data == DATA


def test_allow_hosts_and_private_addresses(info: ModelInfo) -> None:
    with picture_server({"/a.png": DATA}) as server:
        url = f"{server.url}/a.png"
        assert reason_of(url, info, allow_hosts=["127.0.0.2"]) == "not_allowed"
        assert reason_of(url, info, allow_hosts=["127.0.0.1"]) == "not_allowed"
        assert server.num_requests == 0
        image = ingest(url, info, allow_hosts=["127.0.0.1"], allow_private_addresses=True, fit=False)
        assert image.data == DATA


def test_fetch_timeout_s(info: ModelInfo) -> None:
    with picture_server({"/a.png": Reply(DATA, pause_s=5)}) as server:
        settings = {"allow_hosts": ["127.0.0.1"], "allow_private_addresses": True, "fetch_timeout_s": 0.2}
        assert reason_of(f"{server.url}/a.png", info, **settings) == "fetch_timeout"


@pytest.mark.parametrize("setting", ["allow_private_addresses", "fetch_timeout_s"])
def test_a_setting_of_fetching_needs_a_host(setting: str) -> None:
    with pytest.raises(ValidationError, match=f"{setting} has no effect while images.allow_hosts is empty"):
        ImagesConfig.model_validate({setting: 1})


@pytest.mark.parametrize("host", ["https://example.com", "example.com/a", "example.com:80", "*", "a*.com", "", "a b"])
def test_a_host_is_a_name(host: str) -> None:
    with pytest.raises(ValidationError, match="allow_hosts"):
        ImagesConfig.model_validate({"allow_hosts": [host]})


@pytest.mark.parametrize("host", ["example.com", "*.example.com", "localhost", "10.0.0.1", "[::1]", "a", "x-1.y_z.org"])
def test_names_addresses_and_wildcards_are_hosts(host: str) -> None:
    assert ImagesConfig.model_validate({"allow_hosts": [host]}).allow_hosts == (host,)
