from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from latepix.errors import ImageError
from latepix.trace.ingress import GridFit, ImageLimits, InlineImage, ingest_image
from tests.tiny.pictures import data_url, draw_flat, draw_picture, encode

GRID = GridFit(factor=32, min_pixels=32 * 32, max_pixels=1024 * 1024)
#: Real settings: Qwen3-VL, Qwen2.5-VL, a tiny model, and a narrow one.
GRIDS = [
    GridFit(factor=32, min_pixels=65_536, max_pixels=16_777_216),
    GridFit(factor=28, min_pixels=3_136, max_pixels=1_003_520),
    GRID,
    GridFit(factor=32, min_pixels=4_096, max_pixels=65_536),
]


def reason_of(source: object, **options: object) -> str:
    with pytest.raises(ImageError) as caught:
        ingest_image(source, **options)  # ty: ignore[invalid-argument-type]
    return caught.value.reason


def pixels(image: InlineImage) -> np.ndarray:
    return np.asarray(image.open())


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


@pytest.mark.parametrize(
    "source", ["https://example.com/a.png", "file:///etc/passwd", "/tmp/a.png", "", "data:image/png"]
)
def test_text_that_is_not_a_data_url_is_refused(source: str) -> None:
    assert reason_of(source) == "unsupported_source"


@pytest.mark.parametrize("source", [None, 7, Path("a.png"), io.BytesIO(b"x")])
def test_other_types_are_refused(source: object) -> None:
    assert reason_of(source) == "unsupported_source"


def test_bytearray_and_memoryview_are_taken_like_bytes() -> None:
    data = encode(draw_picture())
    assert ingest_image(bytearray(data)) == ingest_image(memoryview(data)) == ingest_image(data)  # ty: ignore[invalid-argument-type]


def test_the_media_type_comes_from_the_bytes_not_from_the_url() -> None:
    jpeg = encode(draw_picture(), file_format="JPEG")
    assert ingest_image(data_url(jpeg, media_type="image/png")).media_type == "image/jpeg"


# --- the canonical form ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file_format", "options"),
    [("PNG", {}), ("PNG", {"compress_level": 1}), ("JPEG", {}), ("JPEG", {"progressive": True, "quality": 50})],
)
def test_a_canonical_picture_passes_byte_for_byte(file_format: str, options: dict[str, object]) -> None:
    data = encode(draw_picture(width=64, height=32), file_format=file_format, **options)
    image = ingest_image(data, fit=GRID)
    assert image.data == data
    assert image.sha256 == hashlib.sha256(data).hexdigest()
    assert (image.width, image.height) == (64, 32)


def test_what_comes_out_goes_in_again_unchanged() -> None:
    image = ingest_image(draw_picture(width=45, height=70, mode="CMYK"), fit=GRID)
    assert ingest_image(image.url, fit=GRID) == image


def test_the_url_holds_the_bytes() -> None:
    image = ingest_image(draw_picture())
    assert image.url == data_url(image.data)
    assert image.num_bytes == len(image.data)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA"])
def test_the_same_source_gives_the_same_bytes(mode: str) -> None:
    first, second = (ingest_image(draw_picture(width=50, height=40, mode=mode), fit=GRID) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_every_allowed_format_becomes_rgb(file_format: str) -> None:
    image = ingest_image(
        encode(
            draw_flat(color=(255, 0, 0)),
            file_format=file_format,
            **({"lossless": True} if file_format == "WEBP" else {}),
        )
    )
    assert image.open().mode == "RGB"
    assert (pixels(image) == (255, 0, 0)).all()


# Row 0 and column 0 of the stored pixels, as the EXIF standard words it.
EXIF_SIDES = {
    1: ("top", "left"),
    2: ("top", "right"),
    3: ("bottom", "right"),
    4: ("bottom", "left"),
    5: ("left", "top"),
    6: ("right", "top"),
    7: ("right", "bottom"),
    8: ("left", "bottom"),
}


def upright(stored: np.ndarray, orientation: int) -> np.ndarray:
    """Put every stored pixel where the EXIF standard says it is seen."""
    rows, columns = stored.shape[:2]
    height, width = (columns, rows) if orientation >= 5 else (rows, columns)
    seen = np.zeros((height, width, 3), dtype=np.uint8)
    for row in range(rows):
        for column in range(columns):
            at = {}
            for side, index in zip(EXIF_SIDES[orientation], (row, column), strict=True):
                at[side] = index
            y = at["top"] if "top" in at else height - 1 - at["bottom"]
            x = at["left"] if "left" in at else width - 1 - at["right"]
            seen[y, x] = stored[row, column]
    return seen


@pytest.mark.parametrize("orientation", EXIF_SIDES)
def test_exif_orientation_is_applied(orientation: int) -> None:
    picture = draw_picture(width=6, height=4)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = ingest_image(encode(picture, exif=exif))
    np.testing.assert_array_equal(pixels(image), upright(np.asarray(picture), orientation))
    assert ingest_image(image.data) == image


def test_a_rotated_picture_carries_no_orientation_any_more() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = ingest_image(encode(draw_picture(width=64, height=32), file_format="JPEG", exif=exif), fit=GRID)
    assert (image.width, image.height) == image.open().size == (32, 64)
    assert ingest_image(image.data, fit=GRID) == image


def test_a_damaged_exif_block_does_not_matter() -> None:
    picture = draw_picture()
    damaged = encode(picture, exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff\x07")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        image = ingest_image(damaged)
    np.testing.assert_array_equal(pixels(image), np.asarray(picture))


@pytest.mark.parametrize(("alpha", "expected"), [(255, (200, 0, 100)), (0, (255, 255, 255)), (51, (244, 204, 224))])
def test_transparency_is_laid_over_white(alpha: int, expected: tuple[int, int, int]) -> None:
    # 255 - (255 - c) * alpha / 255, for c = 200, 0, 100 and alpha 51 = one fifth.
    image = ingest_image(encode(draw_flat(color=(200, 0, 100, alpha), mode="RGBA")))
    assert (pixels(image) == expected).all()


def test_grey_with_alpha_is_laid_over_white() -> None:
    image = ingest_image(draw_flat(color=(0, 51), mode="LA"))
    assert (pixels(image) == 204).all()


@pytest.mark.parametrize("file_format", ["PNG", "GIF"])
def test_a_transparent_palette_color_becomes_white(file_format: str) -> None:
    picture = Image.new("P", (32, 32), 1)
    picture.putpalette([0, 0, 0, 10, 20, 30])
    picture.paste(0, (0, 0, 16, 32))
    image = ingest_image(encode(picture, file_format=file_format, transparency=1))
    assert (pixels(image)[:, :16] == 0).all()
    assert (pixels(image)[:, 16:] == 255).all()


def test_a_transparent_rgb_color_becomes_white() -> None:
    image = ingest_image(encode(draw_flat(color=(9, 8, 7)), transparency=(9, 8, 7)))
    assert (pixels(image) == 255).all()


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [
        ("L", 77, (77, 77, 77)),
        ("1", 1, (255, 255, 255)),
        ("1", 0, (0, 0, 0)),
        ("CMYK", (0, 0, 0, 0), (255, 255, 255)),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
        ("P", 3, (3, 3, 3)),
        ("RGBX", (1, 2, 3, 0), (1, 2, 3)),
        ("YCbCr", (90, 128, 128), (90, 90, 90)),
        ("HSV", (0, 0, 128), (128, 128, 128)),
        ("La", (0, 51), (204, 204, 204)),
        ("RGBa", (0, 0, 0, 51), (204, 204, 204)),
    ],
)
def test_every_color_mode_becomes_rgb(mode: str, color: object, expected: tuple[int, int, int]) -> None:
    picture = Image.new(mode, (32, 32), color)  # ty: ignore[invalid-argument-type]
    if mode == "P":
        picture.putpalette([value for index in range(256) for value in (index, index, index)])
    assert (pixels(ingest_image(picture)) == expected).all()


@pytest.mark.parametrize("mode", ["I;16", "I", "F", "LAB"])
def test_a_picture_without_8_bit_channels_is_refused(mode: str) -> None:
    assert reason_of(Image.new(mode, (32, 32))) == "unsupported_mode"


def test_a_16_bit_grey_file_is_refused_and_not_clipped() -> None:
    data = encode(Image.fromarray(np.full((32, 32), 40_000, dtype=np.uint16)))
    assert reason_of(data) == "unsupported_mode"


def test_a_16_bit_rgb_file_does_not_pass_through() -> None:
    # 16 bits per channel: the high byte of 0x8040 is 0x80.
    header = b"IHDR" + (32).to_bytes(4, "big") * 2 + bytes([16, 2, 0, 0, 0])
    data = png(header, (b"\0" + b"\x80\x40" * 3 * 32) * 32)
    image = ingest_image(data)
    assert image.data != data
    assert (pixels(image) == 0x80).all()


def png(header: bytes, scanlines: bytes) -> bytes:
    chunks = [header, b"IDAT" + zlib.compress(scanlines), b"IEND"]
    body = b"".join(
        (len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") for chunk in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def test_an_animation_gives_its_first_frame() -> None:
    frames = [draw_flat(color=(color, 0, 0)) for color in (255, 0)]
    data = encode(frames[0], file_format="GIF", save_all=True, append_images=frames[1:])
    assert (pixels(ingest_image(data)) == (255, 0, 0)).all()


def test_the_source_picture_is_left_as_it_was() -> None:
    picture = draw_picture(width=50, height=40, mode="RGBA")
    before = picture.tobytes()
    ingest_image(picture, fit=GRID)
    assert (picture.mode, picture.size, picture.tobytes()) == ("RGBA", (50, 40), before)


# --- refused pictures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"hello", b"<svg></svg>", b"%PDF-1.4", encode(draw_picture())[:20]])
def test_bytes_that_are_no_picture_are_refused(data: bytes) -> None:
    assert reason_of(data) == "not_an_image"


@pytest.mark.parametrize(
    "data",
    [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n", b"\xd7\xcd\xc6\x9a\x00\x00" + bytes(60)],
    ids=["EPS", "WMF"],
)
def test_formats_that_start_other_programs_are_refused(data: bytes) -> None:
    assert reason_of(data) == "unsupported_format"


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_a_truncated_file_is_refused(file_format: str) -> None:
    data = encode(draw_picture(width=64, height=64), file_format=file_format)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert reason_of(data[: len(data) * 2 // 3]) in ("truncated", "not_an_image")


FILES = [
    encode(draw_picture(width=16, height=16), file_format=file_format)
    for file_format in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
] + [
    encode(
        draw_flat(color=255, mode="L"), file_format="GIF", save_all=True, append_images=[draw_flat(color=0, mode="L")]
    )
]


@settings(max_examples=400, deadline=None)
@given(
    data=st.sampled_from(FILES),
    keep=st.floats(0.3, 1.0),
    flips=st.lists(st.tuples(st.floats(0, 0.999), st.integers(1, 255)), max_size=4),
)
def test_a_damaged_file_is_a_picture_or_an_image_error(
    data: bytes, keep: float, flips: list[tuple[float, int]]
) -> None:
    damaged = bytearray(data[: int(len(data) * keep)])
    for at, flip in flips:
        damaged[int(at * len(damaged))] ^= flip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(ImageError):
            image = ingest_image(bytes(damaged), fit=GRID)
            assert image.open().size == (image.width, image.height)


def test_the_limit_on_bytes_is_named() -> None:
    data = encode(draw_picture())
    limits = ImageLimits(max_bytes=len(data) - 1)
    with pytest.raises(ImageError, match=rf"{len(data)} bytes.*{len(data) - 1} \(images.max_bytes\)") as caught:
        ingest_image(data, limits=limits)
    assert caught.value.reason == "too_many_bytes"
    assert reason_of(data_url(data), limits=limits) == "too_many_bytes"
    assert ingest_image(data_url(data), limits=ImageLimits(max_bytes=len(data))).data == data


def test_a_large_data_url_is_refused_before_it_is_decoded() -> None:
    assert reason_of("data:image/png;base64," + "?" * 4000, limits=ImageLimits(max_bytes=1000)) == "too_many_bytes"


def test_the_limit_on_pixels_is_checked_from_the_header() -> None:
    data = encode(draw_picture(width=40, height=30))
    # Cut off behind the header: it could not be decoded, and is not.
    assert reason_of(data[:200], limits=ImageLimits(max_pixels=1199)) == "too_many_pixels"
    assert ingest_image(data, limits=ImageLimits(max_pixels=1200)).width == 40


def test_a_decompression_bomb_is_refused() -> None:
    header = b"IHDR" + (50_000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    assert reason_of(png(header, b"\0")) == "too_many_pixels"


@pytest.mark.parametrize("size", [(61, 20), (20, 61)])
def test_the_limit_on_the_aspect_ratio_is_named(size: tuple[int, int]) -> None:
    picture = draw_picture(width=size[0], height=size[1])
    assert reason_of(picture, limits=ImageLimits(max_aspect_ratio=3.0)) == "aspect_ratio"
    assert ingest_image(picture, limits=ImageLimits(max_aspect_ratio=3.05)).width == size[0]


# --- the grid ----------------------------------------------------------------------------------------------------


def test_a_picture_is_resized_to_the_grid_once() -> None:
    image = ingest_image(draw_picture(width=70, height=45), fit=GRID)
    assert (image.width, image.height) == image.open().size == (64, 32)


def test_without_a_grid_the_size_stays() -> None:
    image = ingest_image(draw_picture(width=70, height=45))
    assert (image.width, image.height) == (70, 45)


@settings(max_examples=300, deadline=None)
@given(
    grid=st.sampled_from(GRIDS),
    short=st.integers(1, 3000),
    ratio=st.floats(1, 200),
    is_tall=st.booleans(),
)
def test_a_fitted_size_is_left_alone_by_the_processor(grid: GridFit, short: int, ratio: float, is_tall: bool) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    long = int(short * ratio)
    width, height = (short, long) if is_tall else (long, short)
    fitted_w, fitted_h = grid.size(width, height)
    resized = smart_resize(
        fitted_h, fitted_w, factor=grid.factor, min_pixels=grid.min_pixels, max_pixels=grid.max_pixels
    )
    assert resized == (fitted_h, fitted_w)
    assert grid.size(fitted_w, fitted_h) == (fitted_w, fitted_h)


@settings(max_examples=300, deadline=None)
@given(grid=st.sampled_from(GRIDS), width=st.integers(1, 4000), height=st.integers(1, 4000))
def test_the_processors_own_size_is_known(grid: GridFit, width: int, height: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    if max(width, height) <= 200 * min(width, height):
        resized = smart_resize(
            height, width, factor=grid.factor, min_pixels=grid.min_pixels, max_pixels=grid.max_pixels
        )
        assert grid.processed_size(width, height) == resized[::-1]


@pytest.mark.parametrize("size", [(32, 32), (320, 64), (1024, 1024)])
def test_a_size_on_the_grid_is_kept(size: tuple[int, int]) -> None:
    assert GRID.size(*size) == size
