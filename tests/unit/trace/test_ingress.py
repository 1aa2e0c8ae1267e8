from __future__ import annotations

import hashlib
import io
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from latepix.errors import ImageError
from latepix.trace.ingress import GridFit, ImageLimits, InlineImage, ingest_image
from tests.pictures.build import PACK
from tests.tiny.pictures import data_url, draw_flat, draw_picture, encode, pixels, reason_of

REASONS = {
    *("unsupported_source", "bad_base64", "unsupported_array"),
    *("not_allowed", "unreadable_file", "fetch_failed", "fetch_timeout"),
    *("not_an_image", "unsupported_format", "truncated", "unsupported_mode", "bad_values"),
    *("too_many_bytes", "too_many_pixels", "aspect_ratio"),
}
GRID = GridFit(factor=32, min_pixels=32 * 32, max_pixels=1024 * 1024)
DATA = encode(draw_picture(seed=3))


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
    image = ingest_image(damaged)
    np.testing.assert_array_equal(pixels(image), np.asarray(picture))
    # Another version of Pillow might read it: it does not pass.
    assert image.data != damaged


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


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("I;16", [0, 300, 65_535], [0, 1, 255]),
        ("I;16B", [0, 300, 65_535], [0, 1, 255]),
        ("I", [0, 7, 255], [0, 7, 255]),  # 8-bit values
        ("I", [0, 300, 65_535], [0, 1, 255]),  # 16-bit values
        ("I", [-100, 0, 400], [0, 51, 255]),  # neither: from the smallest to the largest
        ("I", [0, 2**30, 2**31 - 1], [0, 128, 255]),
        ("I", [-5, -5, -5], [0, 0, 0]),
        ("F", [0, 0.2, 1], [0, 51, 255]),
        ("F", [0.1, 0.2, 0.2], [26, 51, 51]),
        ("F", [-100, 0, 400], [0, 51, 255]),
        ("F", [-3e38, 0, 3e38], [0, 128, 255]),
        ("F", [99.6, 99.6, 99.6], [100, 100, 100]),
    ],
)
def test_wide_pixels_are_scaled_and_not_clipped(mode: str, values: list[float], expected: list[int]) -> None:
    kind = {"I;16": "<u2", "I;16B": ">u2", "I": "<i4", "F": "<f4"}[mode]
    image = ingest_image(Image.frombytes(mode, (3, 1), np.asarray(values).astype(kind).tobytes()))
    assert pixels(image)[0, :, 0].tolist() == expected


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_floats_that_are_no_numbers_are_refused(value: float) -> None:
    assert reason_of(Image.fromarray(np.asarray([[0.5, value]], dtype=np.float32))) == "bad_values"


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


def test_an_animation_gives_its_first_frame_and_says_so() -> None:
    frames = [draw_flat(color=(color, 0, 0)) for color in (255, 0)]
    data = encode(frames[0], file_format="GIF", save_all=True, append_images=frames[1:])
    image = ingest_image(data)
    assert (pixels(image) == (255, 0, 0)).all()
    assert image.num_frames == ingest_image(image).num_frames == 2
    assert msgspec.json.decode(msgspec.json.encode(image))["num_frames"] == 2
    assert "num_frames" not in msgspec.json.decode(msgspec.json.encode(ingest_image(frames[0])))


@pytest.mark.parametrize("file_format", ["GIF", "TIFF", "PNG"])
def test_an_opened_animation_is_taken_at_its_frame_and_left_there(file_format: str) -> None:
    frames = [draw_flat(color=(color, 0, 0)) for color in (255, 100, 0)]
    data = encode(frames[0], file_format=file_format, save_all=True, append_images=frames[1:])
    with Image.open(io.BytesIO(data)) as picture:
        picture.seek(1)
        image = ingest_image(picture)
        assert (pixels(image) == (100, 0, 0)).all()
        assert (image.num_frames, picture.tell()) == (3, 1)
    with Image.open(io.BytesIO(data)) as picture:
        picture.load()
    assert (pixels(ingest_image(picture)) == (255, 0, 0)).all()


def test_a_tiff_with_very_many_pages_is_counted_quickly() -> None:
    # 20,000 pages that are one directory each, in a chain: Pillow compares every one with all before it.
    data = bytearray(encode(draw_picture(), file_format="TIFF"))
    (first,) = struct.unpack_from("<I", data, 4)
    (num_entries,) = struct.unpack_from("<H", data, first)
    directory = bytes(data[first : first + 2 + 12 * num_entries])
    at = first + len(directory)
    for _ in range(20_000):
        struct.pack_into("<I", data, at, len(data))
        at = len(data) + len(directory)
        data += directory + bytes(4)
    assert ingest_image(data).num_frames == 20_001


@pytest.mark.parametrize("info", [{"icc_profile": b"x"}, {"dpi": (1, 1)}, {"comment": "x"}, {"gamma": 0.5}])
def test_only_the_pixels_count(info: dict[str, object]) -> None:
    picture = draw_picture(seed=3)
    picture.info.update(info)
    assert ingest_image(picture) == ingest_image(draw_picture(seed=3))
    assert picture.info == info


def test_an_inline_image_without_bytes_is_refused() -> None:
    assert reason_of(InlineImage(sha256="0" * 64, media_type="image/png", width=1, height=1)) == "not_an_image"


def test_the_source_picture_is_left_as_it_was() -> None:
    picture = draw_picture(width=50, height=40, mode="RGBA")
    before = picture.tobytes()
    ingest_image(picture, fit=GRID)
    assert (picture.mode, picture.size, picture.tobytes()) == ("RGBA", (50, 40), before)


# --- refused pictures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"hello", b"<svg></svg>", b"%PDF-1.4", b"BM", b"P9"])
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
    assert reason_of(data[: len(data) * 2 // 3]) == "truncated"


def test_a_process_that_fills_up_truncated_files_cannot_pass_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    data = encode(draw_picture(width=64, height=64), file_format="JPEG")
    assert reason_of(data[: len(data) // 2]) == "truncated"
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_threads_leave_the_settings_of_the_process_as_they_were() -> None:
    before = list(warnings.filters), warnings.showwarning
    damaged = encode(draw_picture(), exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff\x07")
    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(lambda number: ingest_image(damaged if number % 2 else DATA), range(64)))
    assert {image.sha256 for image in images} == {ingest_image(damaged).sha256, ingest_image(DATA).sha256}
    assert (list(warnings.filters), warnings.showwarning) == before
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


class Stubborn(Image.Image):
    """A picture that fails in a way of its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._size, self._mode, self.error = (8, 8), "RGB", error

    def load(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ZeroDivisionError("division by zero"), "truncated"),
        (RecursionError(), "truncated"),
        (AttributeError("no such thing"), "truncated"),
        (MemoryError(), "too_many_pixels"),
        (Image.DecompressionBombError("too large"), "too_many_pixels"),
        (SyntaxError("bad chunk b'secret bytes'"), "truncated"),
    ],
)
def test_every_error_of_a_decoder_becomes_an_image_error(error: Exception, reason: str) -> None:
    with pytest.raises(ImageError) as caught:
        ingest_image(Stubborn(error))
    assert caught.value.reason == reason
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("image_format", ["EPS", "WMF", "HDF5"])
def test_an_opened_picture_whose_decoder_starts_programs_is_refused(image_format: str) -> None:
    picture = Stubborn(AssertionError("it was loaded"))
    picture.format = image_format
    assert reason_of(picture) == "unsupported_format"


PACK_FILES = [path.read_bytes() for path in sorted(PACK.iterdir()) if path.stat().st_size < 4000]


def check_any_bytes(data: bytes, fit: GridFit | None) -> None:
    """Ingest bytes of unknown worth: an ImageError, or a picture that stays what it is."""
    limits = ImageLimits(max_pixels=1_000_000)
    image, reason = None, ""
    try:
        image = ingest_image(data, limits=limits, fit=fit)
    except ImageError as error:
        reason = error.reason
    if image is None:
        assert reason in REASONS
        return
    shown = image.open()
    assert (shown.size, shown.mode) == ((image.width, image.height), "RGB")
    assert hashlib.sha256(image.data).hexdigest() == image.sha256
    assert ingest_image(data, limits=limits, fit=fit) == image
    assert ingest_image(image, fit=fit) == image


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200), start=st.sampled_from([b"", *(data[:40] for data in PACK_FILES)]))
def test_any_bytes_are_a_picture_or_an_image_error(data: bytes, start: bytes) -> None:
    check_any_bytes(start + data, GRID)


@settings(max_examples=1000, deadline=None)
@given(
    data=st.sampled_from(PACK_FILES),
    keep=st.floats(0.3, 1.0),
    flips=st.lists(st.tuples(st.floats(0, 0.999), st.integers(1, 255)), max_size=4),
    insert=st.tuples(st.floats(0, 1), st.binary(max_size=8)),
    fit=st.sampled_from([GRID, None]),
)
def test_a_damaged_file_is_a_picture_or_an_image_error(
    data: bytes, keep: float, flips: list[tuple[float, int]], insert: tuple[float, bytes], fit: GridFit | None
) -> None:
    damaged = bytearray(data[: int(len(data) * keep)] or b"x")
    for at, flip in flips:
        damaged[int(at * len(damaged))] ^= flip
    at = int(insert[0] * len(damaged))
    check_any_bytes(bytes(damaged[:at]) + insert[1] + bytes(damaged[at:]), fit)


def test_a_png_whose_checksums_fit_may_still_be_damaged() -> None:
    header = b"IHDR" + (32).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    assert reason_of(png(header, b"\0" * 500)) == "truncated"


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
