"""The doctor's pictures are what they say, whatever the grid, and are the same every time."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from latepix.parity.pack import PictureCase, picture_pack, scene
from latepix.trace.ingress import GridFit, InlineImage, ingest_image
from tests.tiny.pictures import pixels, reason_of

#: Of the tiny model, of Qwen3-VL, and of Qwen2.5-VL.
GRIDS = (GridFit(32, 32**2, 1024**2), GridFit(32, 65536, 16777216), GridFit(28, 3136, 12845056))
GRID = GRIDS[0]
WIDTH, HEIGHT = 128, 96
SIZED = ("at_min_pixels", "at_max_pixels", "above_max_pixels", "one_pixel", "very_wide", "very_tall", "off_grid")


def pack(grid: GridFit = GRID, *, max_tokens: int = 4000) -> dict[str, PictureCase]:
    return {case.name: case for case in picture_pack(grid, max_tokens=max_tokens)}


PACK = pack()


def opened(name: str) -> Image.Image:
    return Image.open(io.BytesIO(PACK[name].data))


def taken(name: str, *, fit: GridFit | None = None) -> InlineImage:
    return ingest_image(PACK[name].data, fit=fit)


def test_the_same_grid_gives_the_same_bytes() -> None:
    assert pack() == PACK
    assert len(PACK) == len(picture_pack(GRID, max_tokens=4000)) == 35
    assert len({case.data for case in PACK.values()}) == 35


def test_no_case_carries_the_time_it_was_made() -> None:
    profile = opened("png_icc").info["icc_profile"]
    assert profile[24:36] == bytes(12)


@pytest.mark.parametrize(
    ("name", "file_format", "mode"),
    [
        ("png_rgb", "PNG", "RGB"),
        ("png_interlaced", "PNG", "RGB"),
        ("png_rgba", "PNG", "RGBA"),
        ("png_grey", "PNG", "L"),
        ("png_grey_alpha", "PNG", "LA"),
        ("png_grey_16_bit", "PNG", "I;16"),
        ("png_1_bit", "PNG", "1"),
        ("png_palette", "PNG", "P"),
        ("png_palette_alpha", "PNG", "P"),
        ("jpeg_baseline", "JPEG", "RGB"),
        ("jpeg_progressive", "JPEG", "RGB"),
        ("jpeg_grey", "JPEG", "L"),
        ("jpeg_cmyk", "JPEG", "CMYK"),
        ("gif_animated", "GIF", "P"),
        ("webp_lossy", "WEBP", "RGB"),
        ("webp_lossless", "WEBP", "RGBA"),
    ],
)
def test_a_case_is_of_the_kind_it_says(name: str, file_format: str, mode: str) -> None:
    picture = opened(name)
    assert (picture.format, picture.mode, picture.size) == (file_format, mode, (WIDTH, HEIGHT))


def test_what_a_mode_does_not_show() -> None:
    assert opened("png_interlaced").info["interlace"] == 1
    assert PACK["png_rgb_16_bit"].data[24] == 16
    assert opened("png_palette_alpha").info["transparency"] == bytes((0, 85, 170, 255))
    assert getattr(opened("gif_animated"), "n_frames", 1) == 3
    assert "progressive" in opened("jpeg_progressive").info
    assert "progressive" not in opened("jpeg_baseline").info
    for name in ("jpeg_baseline", "jpeg_progressive"):
        jpeg = opened(name)
        assert isinstance(jpeg, JpegImageFile)
        assert [layer[1:3] for layer in jpeg.layer] == [(2, 2), (1, 1), (1, 1)], name
    assert b"VP8L" in PACK["webp_lossless"].data
    assert b"VP8L" not in PACK["webp_lossy"].data


@pytest.mark.parametrize("name", ["png_rgb", "png_interlaced", "png_icc"])
def test_lossless_pictures_show_the_scene(name: str) -> None:
    assert (pixels(taken(name)) == scene(WIDTH, HEIGHT)).all()


def test_the_high_bytes_of_16_bit_channels_are_the_scene() -> None:
    assert (pixels(taken("png_rgb_16_bit")) == scene(WIDTH, HEIGHT)).all()


@pytest.mark.parametrize("orientation", [2, 3, 5, 6, 8])
def test_an_orientation_is_stored_turned_and_comes_out_upright(orientation: int) -> None:
    stored = opened(f"jpeg_exif_{orientation}")
    assert stored.getexif()[0x0112] == orientation
    assert stored.size == ((HEIGHT, WIDTH) if orientation >= 5 else (WIDTH, HEIGHT))
    upright = pixels(taken(f"jpeg_exif_{orientation}")).astype(int)
    # Without the blue checkerboard, whose edges JPEG blurs.
    assert np.abs(upright - scene(WIDTH, HEIGHT))[..., :2].mean() < 6


def test_the_profile_would_swap_red_and_blue() -> None:
    profile = opened("png_icc").info["icc_profile"]
    (count,) = struct.unpack_from(">I", profile, 128)
    tags = {entry[0]: entry[1:] for entry in struct.iter_unpack(">4sII", profile[132 : 132 + 12 * count])}
    # XYZ of the primary: red light has more X than Z, blue light more Z than X.
    x, _, z = struct.unpack_from(">iii", profile, tags[b"rXYZ"][0] + 8)
    assert z > x


@pytest.mark.parametrize("grid", GRIDS, ids=["tiny", "qwen3_vl", "qwen2_5_vl"])
def test_kinds_are_drawn_at_a_size_that_the_grid_leaves_alone(grid: GridFit) -> None:
    drawn = pack(grid, max_tokens=1000)
    for name in ("png_rgb", "jpeg_baseline", "jpeg_progressive", "png_icc", "at_min_pixels", "at_max_pixels"):
        image = ingest_image(drawn[name].data, fit=grid)
        assert image.data == drawn[name].data, name


@pytest.mark.parametrize("grid", GRIDS, ids=["tiny", "qwen3_vl", "qwen2_5_vl"])
def test_sizes_meet_and_exceed_the_limits_of_the_grid(grid: GridFit) -> None:
    token_pixels = grid.factor**2
    cases = pack(grid, max_tokens=100_000)
    drawn = {name: Image.open(io.BytesIO(cases[name].data)).size for name in SIZED}
    areas = {name: width * height for name, (width, height) in drawn.items()}
    assert grid.min_pixels <= areas["at_min_pixels"] < grid.min_pixels + 2 * token_pixels
    # A prime number of tokens makes no fair rectangle, so some may be missing.
    assert 0.99 * grid.max_pixels < areas["at_max_pixels"] <= grid.max_pixels < areas["above_max_pixels"]
    assert drawn["one_pixel"] == (1, 1)
    assert drawn["very_wide"][0] == 50 * drawn["very_wide"][1]
    assert drawn["very_tall"][1] == 50 * drawn["very_tall"][0]
    assert all(side % grid.factor for side in drawn["off_grid"])


def test_the_largest_picture_stays_within_the_context() -> None:
    case = pack(GRIDS[1], max_tokens=500)["at_max_pixels"]
    width, height = Image.open(io.BytesIO(case.data)).size
    assert 400 <= (width // 32) * (height // 32) <= 500
    assert "max_model_len" in case.about


def test_what_must_be_refused_is_refused_for_that_reason() -> None:
    refusals = {name: case.refusal for name, case in PACK.items() if case.refusal}
    assert len(refusals) == 2
    for name, reason in refusals.items():
        assert reason_of(PACK[name].data) == reason


def test_everything_else_passes_the_door_with_and_without_fit() -> None:
    for name, case in PACK.items():
        if case.refusal is None:
            taken(name)
            fitted = taken(name, fit=GRID)
            assert GRID.processed_size(fitted.width, fitted.height) == (fitted.width, fitted.height), name
