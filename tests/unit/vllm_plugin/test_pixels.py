"""The body of `/latepix/pixels` is checked, and pixels travel as they are."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from latepix_vllm.pixels import check_placeholders, describe_item, parse_request

PART = {"type": "image_url", "url": "data:image/png;base64,AAAA"}


def identity(pixels: Any, dtype: Any) -> Any:
    return pixels.to(dtype)


def test_a_request_gives_ids_and_urls() -> None:
    assert parse_request({"token_ids": [1, 2], "content_parts": [PART]}) == ([1, 2], [PART["url"]])
    assert parse_request({"token_ids": [1]}) == ([1], [])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (None, "The body must be"),
        ({"token_ids": [1], "images": []}, "got an object with images, token_ids"),
        ({"token_ids": "12"}, "token_ids must be"),
        ({"token_ids": [True]}, "token_ids must be"),
        ({"token_ids": [1], "content_parts": {}}, "content_parts must be a list"),
        ({"token_ids": [1], "content_parts": [PART, "x"]}, r"content_parts\[1\] must be"),
        (
            {"token_ids": [1], "content_parts": [{"type": "image_url", "image_url": PART}]},
            "must be a data url.*nothing",
        ),
        ({"token_ids": [1], "content_parts": [PART | {"url": "file:///etc/passwd"}]}, "nothing is fetched"),
    ],
)
def test_other_bodies_are_refused(body: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_request(body)


@pytest.mark.parametrize("name", ["image_token_id", "media_placeholder_token_id"])
def test_placeholders_are_counted_against_pictures(name: str) -> None:
    config = SimpleNamespace(**{name: 7})
    check_placeholders([1, 7, 2, 7], 2, config)
    with pytest.raises(ValueError, match=r"2 placeholders \(id 7\), and content_parts 1 picture"):
        check_placeholders([1, 7, 2, 7], 1, config)


def test_a_family_without_a_known_placeholder_is_left_to_vllm() -> None:
    check_placeholders([1], 2, SimpleNamespace())


def test_pixels_are_normalized_flat_float32() -> None:
    # Kimi's patches come as pictures, and its grid has another name.
    patches = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 2, 2)
    item = {"pixel_values": patches, "grid_thws": torch.tensor([[1, 1, 2]])}
    shown = describe_item(item, lambda pixels, dtype: pixels.to(dtype) / 2)
    assert shown["grid_thw"] == [1, 1, 2]
    assert shown["shape"] == [2, 12]
    assert shown["dtype"] == "float32"
    data = np.frombuffer(base64.b64decode(shown["data"]), dtype="<f4")
    assert data.tolist() == [number / 2 for number in range(24)]


def test_half_precision_pixels_are_shown_exactly() -> None:
    item = {"pixel_values": torch.full((1, 2), 0.1, dtype=torch.bfloat16), "image_grid_thw": torch.tensor([1, 1, 1])}
    data = np.frombuffer(base64.b64decode(describe_item(item, identity)["data"]), dtype="<f4")
    assert data.tolist() == [torch.tensor(0.1, dtype=torch.bfloat16).item()] * 2


def test_other_pictures_are_refused() -> None:
    with pytest.raises(RuntimeError, match="no pixel_values or no grid, but image_embeds"):
        describe_item({"image_embeds": torch.zeros(1)}, identity)
