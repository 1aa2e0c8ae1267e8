"""What ingress makes of each file in `tests/pictures/pack`: ONE table, with pixels worked out by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from latepix.errors import ImageError
from latepix.trace.ingress import GridFit, ImageLimits, InlineImage, ingest_image
from tests.pictures.build import (
    ALPHA,
    COLORS,
    FLOATS,
    GREY,
    INDICES,
    LAB_A,
    LAB_B,
    PACK,
    PALETTE,
    PALETTE_ALPHA,
    WIDE,
    WIDE_COLORS,
    build_pack,
)

FIT = GridFit(factor=32, min_pixels=32 * 32, max_pixels=1024 * 1024)
#: Errors of lossy encoders on the smooth patterns, measured (at most 3, and 7 where color is subsampled), plus 1.
LOSSY, SUBSAMPLED = 4, 8


class Good(NamedTuple):
    """A picture that is taken.

    Attributes:
        pixels: [H, W, 3] what must be seen.
        tolerance: largest difference of a value.
        passes: the file itself is the canonical form.
        num_frames: of the source.
    """

    pixels: np.ndarray[Any, Any]
    tolerance: int = 0
    passes: bool = False
    num_frames: int = 1


# --- the pixels, by hand -----------------------------------------------------------------------------------------


def rounded(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.floor(values + 0.5).astype(np.uint8)


def grey(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.repeat(values.astype(np.uint8)[..., None], 3, axis=-1)


def over_white(pixels: np.ndarray[Any, Any], alpha: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return rounded(255 - (255.0 - pixels) * alpha[..., None] / 255)


def white_where(pixels: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(mask[..., None], 255, pixels).astype(np.uint8)


def stretched(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values = values.astype(np.float64)
    return grey(rounded((values - values.min()) / (values.max() - values.min()) * 255))


def flat(width: int, height: int) -> np.ndarray[Any, Any]:
    return np.broadcast_to(np.asarray([10, 200, 30], dtype=np.uint8), (height, width, 3))


def seen(orientation: int) -> np.ndarray[Any, Any]:
    """Return what is seen of the stored pixels, from the EXIF standard's naming of row 0 and column 0."""
    turned = {
        2: COLORS[:, ::-1],
        3: COLORS[::-1, ::-1],
        4: COLORS[::-1],
        5: COLORS.swapaxes(0, 1),
        6: COLORS.swapaxes(0, 1)[:, ::-1],
        7: COLORS.swapaxes(0, 1)[::-1, ::-1],
        8: COLORS.swapaxes(0, 1)[::-1],
    }
    return turned.get(orientation, COLORS)


def lab() -> np.ndarray[Any, Any]:
    """Return the sRGB of CIE L*a*b* (D50), with the matrix of Bruce Lindbloom (Bradford-adapted)."""
    lightness = GREY * (100 / 255)
    y = (lightness + 16) / 116
    roots = np.stack([y + LAB_A / 500, y, y - LAB_B / 200], axis=-1)
    xyz = np.where(roots > 6 / 29, roots**3, 3 * (6 / 29) ** 2 * (roots - 4 / 29)) * [0.9642, 1.0, 0.8251]
    to_rgb = [
        [3.1338561, -1.6168667, -0.4906146],
        [-0.9787684, 1.9161415, 0.0334540],
        [0.0719453, -0.2289914, 1.4052427],
    ]
    linear = np.clip(xyz @ np.asarray(to_rgb).T, 0, 1)
    return rounded(255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055))


INDEXED = PALETTE[INDICES]
INDEXED_ALPHA = np.asarray(PALETTE_ALPHA)[INDICES]
BILEVEL = grey(np.where(GREY >= 128, 255, 0))
LAID = over_white(COLORS, ALPHA)
LAID_GREY = over_white(grey(GREY), ALPHA)
HIGH, HIGH_COLORS = grey(WIDE >> 8), (WIDE_COLORS >> 8).astype(np.uint8)
CMYK = rounded(COLORS * (204 / 255))
KEYED = white_where(COLORS, (COLORS[3, 5] == COLORS).all(-1))

# --- the table ---------------------------------------------------------------------------------------------------

EXPECTED: dict[str, Good | str] = {
    # PNG: modes and depths
    "rgb8.png": Good(COLORS, passes=True),
    "rgb8_interlaced.png": Good(COLORS, passes=True),
    "rgb8_icc.png": Good(COLORS, passes=True),
    "rgb16.png": Good(HIGH_COLORS),
    "rgba8.png": Good(LAID, 1),
    "rgba16.png": Good(over_white(HIGH_COLORS, ALPHA), 1),
    "la8.png": Good(LAID_GREY, 1),
    "la16.png": Good(over_white(HIGH, ALPHA), 1),
    "grey1.png": Good(grey(INDICES % 2 * 255)),
    "grey2.png": Good(grey(INDICES * 85)),
    "grey4.png": Good(grey(INDICES * 17)),
    "grey8.png": Good(grey(GREY)),
    "grey16.png": Good(HIGH),
    "palette1.png": Good(PALETTE[INDICES % 2]),
    "palette2.png": Good(INDEXED),
    "palette4.png": Good(INDEXED),
    "palette8.png": Good(INDEXED),
    "animated.png": Good(COLORS, num_frames=3),
    # PNG: one transparent color, or one alpha for each color of a palette
    "grey1_key.png": Good(white_where(grey(GREY * 0), INDICES % 2 == 1)),
    "grey2_key.png": Good(white_where(grey(INDICES * 85), INDICES == 1)),
    "grey4_key.png": Good(white_where(grey(INDICES * 17), INDICES == 1)),
    "grey8_key.png": Good(white_where(grey(INDICES), INDICES == 1)),
    "grey16_key.png": Good(white_where(HIGH, WIDE[3, 5] == WIDE)),
    "rgb8_key.png": Good(KEYED),
    "rgb8_key_late.png": Good(KEYED),
    "rgb16_key.png": Good(white_where(HIGH_COLORS, (HIGH_COLORS[3, 5] == HIGH_COLORS).all(-1))),
    "palette8_key.png": Good(white_where(INDEXED, INDICES == 2)),
    "palette2_alpha.png": Good(over_white(INDEXED, INDEXED_ALPHA), 1),
    # JPEG
    "jpeg.jpg": Good(COLORS, LOSSY, passes=True),
    "jpeg_subsampled.jpg": Good(COLORS, SUBSAMPLED, passes=True),
    "jpeg_progressive.jpg": Good(COLORS, LOSSY, passes=True),
    "jpeg_arithmetic.jpg": Good(COLORS, LOSSY, passes=True),
    "jpeg_adobe_rgb.jpg": Good(COLORS, LOSSY, passes=True),
    "jpeg_icc.jpg": Good(COLORS, LOSSY, passes=True),
    "jpeg_with_a_film.jpg": Good(COLORS, LOSSY, passes=True),
    "jpeg_named.png": Good(COLORS, LOSSY, passes=True),
    "jpeg_grey.jpg": Good(grey(GREY), LOSSY),
    "jpeg_cmyk.jpg": Good(CMYK, LOSSY),
    "jpeg_ycck.jpg": Good(COLORS, LOSSY),
    "jpeg_two_pictures.jpg": Good(COLORS, LOSSY, num_frames=2),
    # orientation
    **{f"orientation{n}.jpg": Good(seen(n), LOSSY, passes=n < 2) for n in range(9)},
    "orientation6.png": Good(seen(6)),
    "orientation6_late.png": Good(seen(6)),
    "orientation6_xmp.png": Good(seen(6)),
    "orientation6.webp": Good(seen(6)),
    "orientation6.tif": Good(seen(6)),
    "orientation6_lzw.tif": Good(seen(6)),
    # WEBP, GIF, BMP
    "lossless.webp": Good(COLORS),
    "lossy.webp": Good(COLORS, SUBSAMPLED),
    "alpha.webp": Good(LAID, 1),
    "animated.webp": Good(COLORS, num_frames=3),
    "palette.gif": Good(INDEXED),
    "transparent.gif": Good(white_where(INDEXED, INDICES == 2)),
    "animated.gif": Good(INDEXED, num_frames=3),
    "rgb.bmp": Good(COLORS),
    "rgb_32_bits.bmp": Good(COLORS),  # the fourth byte is no alpha unless the header says so
    "grey.bmp": Good(grey(GREY)),
    "palette.bmp": Good(INDEXED),
    "bilevel.bmp": Good(BILEVEL),
    # TIFF
    "rgb.tif": Good(COLORS),
    "rgb_lzw.tif": Good(COLORS),
    "rgb_big.tif": Good(COLORS),
    "rgba.tif": Good(LAID, 1),
    "grey.tif": Good(grey(GREY)),
    "la.tif": Good(LAID_GREY, 1),
    "bilevel.tif": Good(BILEVEL),
    "palette.tif": Good(INDEXED),
    "pa.tif": Good(INDEXED),
    "cmyk.tif": Good(CMYK, 1),
    "ycbcr.tif": Good(COLORS, 3),  # 8 bits of luma and chroma
    "lab.tif": Good(lab(), 5),  # LittleCMS interpolates in a table; at the ends the colors leave sRGB
    "grey12.tif": Good(HIGH),
    "grey16.tif": Good(HIGH),
    "grey16_big_endian.tif": Good(HIGH),
    "grey16_lzw.tif": Good(HIGH),
    "grey16_white_is_zero.tif": Good(255 - HIGH),
    "int32.tif": Good(stretched(WIDE)),
    "int32_of_16_bits.tif": Good(HIGH),
    "int32_of_8_bits.tif": Good(grey(GREY)),
    "uint32.tif": Good(stretched(WIDE)),
    "float.tif": Good(grey(rounded(FLOATS * 255))),
    "float_range.tif": Good(stretched(FLOATS * 700 - 200), 1),
    "float_flat.tif": Good(grey(np.full_like(GREY, 77))),
    "float_nan.tif": "bad_values",
    "pages.tif": Good(COLORS, num_frames=3),
    # netpbm
    "plain.pbm": Good(BILEVEL),
    "plain.ppm": Good(COLORS),
    "bits.pbm": Good(BILEVEL),
    "grey8.pgm": Good(grey(GREY)),
    "grey16.pgm": Good(HIGH),
    "grey16_dark.pgm": Good(grey(GREY >> 8)),
    "rgb8.ppm": Good(COLORS),
    "rgb16.ppm": Good(HIGH_COLORS, 1),  # Pillow rounds here
    "float.pfm": Good(grey(rounded(FLOATS * 255))),
    # sizes
    "size_1x1.png": Good(flat(1, 1), passes=True),
    "size_31x639.png": Good(flat(31, 639), passes=True),
    "size_200x1.png": Good(flat(200, 1), passes=True),
    "size_5x1000.png": Good(flat(5, 1000), passes=True),
    "size_4000x20.png": Good(flat(4000, 20), passes=True),
    "size_201x1.png": "aspect_ratio",
    "size_1x3000.png": "aspect_ratio",
    "size_8000x8000.png": "too_many_pixels",
    # broken
    **{
        f"cut_{cut}.{ending}": "truncated"
        for cut in ("at_0.3", "at_0.9", "by_20")
        for ending in ("png", "jpg", "webp", "gif", "bmp", "tif")
    },
    "cut_in_header.png": "truncated",
    "cut_before_end.png": "truncated",
    "crc_of_header.png": "truncated",
    "crc_of_pixels.png": "truncated",
    "crc_of_text.png": "truncated",
    "no_width.png": "truncated",
    "damaged_exif.jpg": Good(np.asarray(Image.open(PACK / "damaged_exif_gone.jpg"))),
    "damaged_exif_gone.jpg": Good(np.asarray(Image.open(PACK / "damaged_exif_gone.jpg")), passes=True),
    "huge_header.png": "too_many_pixels",
    "huge_header.gif": "too_many_pixels",
    "huge_header.webp": "too_many_pixels",
    "huge_header.bmp": "too_many_pixels",
    "empty.png": "not_an_image",
    "html.png": "not_an_image",
    "text.jpg": "not_an_image",
    "zip.png": "not_an_image",
    "zeros.png": "not_an_image",
    # formats that run other programs, and others that are not on the list
    "drawing.eps": "unsupported_format",
    "drawing_dos.eps": "unsupported_format",
    "drawing.wmf": "unsupported_format",
    "drawing.emf": "unsupported_format",
    "icon.ico": "unsupported_format",
    "layers.psd": "unsupported_format",
    "head.avif": "unsupported_format",
    "head.heic": "unsupported_format",
    "head.jp2": "unsupported_format",
    "drawing.svg": "not_an_image",
    "document.pdf": "not_an_image",
    "targa.tga": "not_an_image",
}
GOOD = {name: expected for name, expected in EXPECTED.items() if isinstance(expected, Good)}
BAD = {name: expected for name, expected in EXPECTED.items() if isinstance(expected, str)}

# --- the tests ---------------------------------------------------------------------------------------------------


def read(name: str) -> bytes:
    return (PACK / name).read_bytes()


def differ(image: InlineImage, pixels: np.ndarray[Any, Any]) -> int:
    shown = np.asarray(image.open())
    assert shown.shape == pixels.shape
    return int(np.abs(shown.astype(int) - pixels.astype(int)).max())


def test_the_table_the_pack_and_its_script_name_the_same_files() -> None:
    files, again = build_pack(), build_pack()
    assert files == again
    assert files.keys() == {path.name for path in PACK.iterdir()} == EXPECTED.keys()


def test_the_pack_is_small() -> None:
    assert sum(path.stat().st_size for path in PACK.iterdir()) < 1_000_000


@pytest.mark.parametrize("name", GOOD)
def test_a_good_picture_is_seen_as_it_should_be(name: str) -> None:
    expected, data = GOOD[name], read(name)
    image = ingest_image(data)
    assert (image.width, image.height) == expected.pixels.shape[1::-1] == image.open().size
    assert image.open().mode == "RGB"
    assert differ(image, expected.pixels) <= expected.tolerance
    assert image.num_frames == expected.num_frames
    assert (image.data == data) == expected.passes
    assert ingest_image(data) == image
    assert ingest_image(image.data).data == ingest_image(image.url).data == image.data
    assert ingest_image(image) == image


@pytest.mark.parametrize("name", GOOD)
def test_a_good_picture_is_resized_once_to_the_grid(name: str) -> None:
    expected, data = GOOD[name], read(name)
    image = ingest_image(data, fit=FIT)
    height, width = expected.pixels.shape[:2]
    assert (image.width, image.height) == FIT.size(width, height) == image.open().size
    resized = Image.fromarray(np.ascontiguousarray(expected.pixels)).resize(
        (image.width, image.height), Image.Resampling.BICUBIC
    )
    # A bicubic weight can be negative: differences grow by less than a half.
    assert differ(image, np.asarray(resized)) <= expected.tolerance * 1.5
    assert ingest_image(image, fit=FIT) == image


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("fit", [None, FIT], ids=["as it is", "fit"])
def test_a_bad_picture_is_refused_with_its_reason(name: str, fit: GridFit | None) -> None:
    with pytest.raises(ImageError) as caught:
        ingest_image(read(name), fit=fit)
    assert caught.value.reason == BAD[name]
    assert len(str(caught.value)) < 400
    assert "b'" not in str(caught.value)


def test_a_large_picture_is_taken_where_the_limit_allows_it() -> None:
    limits = ImageLimits(max_pixels=64_000_000)
    image = ingest_image(read("size_8000x8000.png"), limits=limits, fit=FIT)
    pixels = np.asarray(image.open())
    assert pixels.shape == (1024, 1024, 3)
    assert (pixels[:12] == 255).all()
    assert (pixels[15:] == 0).all()


@pytest.mark.parametrize("name", ["jpeg_progressive.jpg", "jpeg_arithmetic.jpg"])
def test_another_coding_of_the_same_jpeg_has_the_same_pixels(name: str) -> None:
    np.testing.assert_array_equal(
        np.asarray(ingest_image(read(name)).open()), np.asarray(ingest_image(read("jpeg.jpg")).open())
    )
