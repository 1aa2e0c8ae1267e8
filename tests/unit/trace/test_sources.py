"""Every form in which a picture is handed over: data URLs, bytes, content parts and arrays."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest

from latepix.trace.ingress import GridFit, ImageLimits, ingest_image
from tests.tiny.pictures import data_url, draw_picture, encode, pixels, reason_of

GRID = GridFit(factor=32, min_pixels=32 * 32, max_pixels=1024 * 1024)


# --- data URLs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix", ["data:image/png;base64,", "DATA:IMAGE/PNG;BASE64,", "data:;base64,", "data:image/png;a=b;base64,"]
)
def test_a_base64_data_url_is_taken(prefix: str) -> None:
    data = encode(draw_picture())
    assert ingest_image(prefix + base64.b64encode(data).decode()).data == data


@pytest.mark.parametrize(
    "payload",
    ["QUJD\nREVG", "QUJD REVG", "QUJ", "QUJDRA", "-_-_", "QUJDRA==QUJD", "QUJ=D", "\u00e9t\u00e9", "QUJDRA==="],
    ids=[
        "newline",
        "space",
        "short",
        "no padding",
        "url-safe",
        "data after padding",
        "padding inside",
        "not ascii",
        "extra padding",
    ],
)
def test_anything_but_strict_base64_is_refused(payload: str) -> None:
    assert reason_of("data:image/png;base64," + payload) == "bad_base64"


def test_a_data_url_without_base64_is_refused() -> None:
    assert reason_of("data:image/png,abc") == "bad_base64"


@pytest.mark.parametrize("source", ["", "data:image/png", "iVBORw0KGgoAAAANSUhEUg==", "/9j/4AAQSkZJRg==", "ftp://a/b"])
def test_text_in_no_known_form_is_refused(source: str) -> None:
    assert reason_of(source) == "unsupported_source"


@pytest.mark.parametrize("source", ["https://example.com/a.png", "file:///etc/passwd", "/tmp/a.png", Path("a.png")])
def test_paths_and_urls_are_refused_unless_they_are_allowed(source: object) -> None:
    assert reason_of(source) == "not_allowed"


@pytest.mark.parametrize("source", [None, 7, io.BytesIO(b"x"), ["a"], (1, 2)])
def test_other_types_are_refused(source: object) -> None:
    assert reason_of(source) == "unsupported_source"


def test_bytearray_and_memoryview_are_taken_like_bytes() -> None:
    data = encode(draw_picture())
    assert ingest_image(bytearray(data)) == ingest_image(memoryview(data)) == ingest_image(data)


# --- content parts -----------------------------------------------------------------------------------------------

DATA = encode(draw_picture(seed=3))
URL, BASE64 = data_url(DATA), base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": URL},
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_image", "image_url": URL, "file_id": None},
        {"image_url": {"url": URL}},
        {"url": URL},
        {"type": "image", "image": URL},
        {"type": "image", "image": DATA},
        {"type": "image", "url": URL},
        {"type": "image", "base64": BASE64},
        {"type": "image", "data": BASE64, "mimeType": "image/png"},
        {"type": "image", "data": DATA},
        {"type": "image", "data": URL},
        {"type": "image", "source": URL},
        {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": BASE64}},
        {"type": "image", "source": {"type": "url", "url": URL}},
        {"bytes": DATA, "path": "name.png"},
    ],
)
def test_a_content_part_of_every_api_is_taken(part: dict[str, object]) -> None:
    assert ingest_image(part).data == DATA


@pytest.mark.parametrize("value", [draw_picture(seed=3), np.asarray(draw_picture(seed=3))], ids=["PIL", "numpy"])
def test_a_content_part_may_hold_pixels(value: object) -> None:
    assert ingest_image({"type": "image", "image": value}).open().tobytes() == draw_picture(seed=3).tobytes()


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({}, "unsupported_source"),
        ({"type": "text", "text": "hello"}, "unsupported_source"),
        ({"type": "video", "url": URL}, "unsupported_source"),
        ({"type": 3, "url": URL}, "unsupported_source"),
        ({"type": "image"}, "unsupported_source"),
        ({"type": "input_image", "file_id": "file-1"}, "unsupported_source"),
        ({"type": "image", "image": URL, "url": URL}, "unsupported_source"),
        ({"type": "image", "source": {"type": "file", "file_id": "x"}}, "unsupported_source"),
        ({"image": {"image": {"image": {"image": URL}}}}, "unsupported_source"),
        ({"type": "image", "image": ["a"]}, "unsupported_source"),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "not_allowed"),
        ({"type": "image", "source": {"type": "url", "url": "http://example.com/a.png"}}, "not_allowed"),
        ({"type": "image", "path": "data:;base64,"}, "not_allowed"),
        ({"type": "image", "data": "not base64"}, "bad_base64"),
        ({"type": "image", "data": ""}, "not_an_image"),
        ({"type": "image", "data": "A" * 40_000}, "too_many_bytes"),
    ],
)
def test_other_parts_are_refused(part: dict[str, object], reason: str) -> None:
    assert reason_of(part, limits=ImageLimits(max_bytes=len(DATA))) == reason


# --- arrays ------------------------------------------------------------------------------------------------------

RGB = np.asarray(draw_picture(width=5, height=3))


@pytest.mark.parametrize("channels", ["HxW", "HxWx1"])
def test_a_grey_array_is_taken(channels: str) -> None:
    grey = RGB[..., :1] if channels == "HxWx1" else RGB[..., 0]
    np.testing.assert_array_equal(pixels(ingest_image(grey)), np.repeat(RGB[..., :1], 3, axis=-1))


def test_the_kind_of_numbers_does_not_matter() -> None:
    for array in (
        RGB,
        np.asfortranarray(RGB),
        RGB[::-1][::-1],
        RGB.astype(np.uint16) * 257,
        (RGB.astype(np.uint16) * 257).astype(">u2"),
        RGB / 255,
        (RGB / 255).astype(np.float32),
        (RGB / 255).astype(np.float16),
    ):
        np.testing.assert_array_equal(pixels(ingest_image(array)), RGB)


def test_an_array_with_alpha_lies_over_white() -> None:
    array = np.dstack([RGB, np.full_like(RGB[..., 0], 51)])
    expected = np.floor(255 - (255.0 - RGB) / 5 + 0.5)
    for kind in (array, array.astype(np.uint16) * 257, array / 255):
        assert np.abs(pixels(ingest_image(kind)) - expected).max() <= 1


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros((3, 5, 2), np.uint8), "unsupported_array"),
        (np.zeros((3, 64, 64), np.uint8), "unsupported_array"),
        (np.zeros((1, 3, 5, 3), np.uint8), "unsupported_array"),
        (np.zeros(5, np.uint8), "unsupported_array"),
        (np.zeros((), np.uint8), "unsupported_array"),
        (np.zeros((3, 5), np.int64), "unsupported_array"),
        (np.zeros((3, 5), np.int8), "unsupported_array"),
        (np.zeros((3, 5), bool), "unsupported_array"),
        (np.zeros((3, 5), np.complex64), "unsupported_array"),
        (np.zeros((3, 5), object), "unsupported_array"),
        (np.full((3, 5), 1.01), "bad_values"),
        (np.full((3, 5), -0.01), "bad_values"),
        (np.full((3, 5), np.nan), "bad_values"),
        (np.full((3, 5), np.inf, np.float16), "bad_values"),
        (np.zeros((0, 5), np.uint8), "not_an_image"),
        (np.zeros((3, 700), np.uint8), "aspect_ratio"),
        (np.zeros((40, 40), np.uint8), "too_many_pixels"),
    ],
    ids=str,
)
def test_other_arrays_are_refused_by_name(array: np.ndarray, reason: str) -> None:
    assert reason_of(array, limits=ImageLimits(max_pixels=1500 if array.shape == (40, 40) else 50_000)) == reason


def test_the_array_is_left_as_it_was() -> None:
    array = RGB.copy()
    ingest_image(array, fit=GRID)
    np.testing.assert_array_equal(array, RGB)


def test_the_media_type_comes_from_the_bytes_not_from_the_url() -> None:
    jpeg = encode(draw_picture(), file_format="JPEG")
    assert ingest_image(data_url(jpeg, media_type="image/png")).media_type == "image/jpeg"
