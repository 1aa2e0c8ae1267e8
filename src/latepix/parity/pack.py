"""The picture pack of `latepix doctor`: one small file for each kind of picture that people send, drawn here.

In: the grid of a model's family. Out: files as a user would hand them over. What holds: the same grid gives the same
bytes (under the same Pillow); no file needs anything beside Pillow and numpy. Kinds are drawn at a size that the grid
leaves alone, so that a JPEG reaches the server as the file it is; sizes and limits have cases of their own.
"""

from __future__ import annotations

import io
import itertools
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from PIL import Image, ImageCms

from latepix.trace.ingress import GridFit

#: Orientation -> how upright pixels are stored under it.
_STORED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    8: Image.Transpose.ROTATE_270,
}
_EXIF_ORIENTATION = 0x0112
_PALETTE = np.asarray([[250, 10, 20], [30, 240, 40], [50, 60, 230], [200, 200, 90]], dtype=np.uint8)
_PALETTE_ALPHA = bytes((0, 85, 170, 255))
#: First pixel (row, column) and distance to the next (down, right) in the seven passes of an interlaced PNG.
_ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
#: Longer side over shorter side of the pictures that fill a number of tokens exactly.
_MAX_ASPECT = 4


class PictureCase(msgspec.Struct, frozen=True):
    """One file of the pack.

    Attributes:
        name: short, unique.
        about: what is special about it.
        data: the file.
        refusal: reason code under which ingress must refuse it; None if it must take it.
    """

    name: str
    about: str
    data: bytes
    refusal: str | None = None


def picture_pack(grid: GridFit, *, max_tokens: int) -> list[PictureCase]:
    """Draw the pack for a family's grid.

    Args:
        grid: its sizes are met, missed and exceeded.
        max_tokens: largest picture that the context has room for; the case at the upper limit stays below it.
    """
    width, height = grid.size(4 * grid.factor, 3 * grid.factor)
    return [*_pngs(width, height), *_others(width, height), *_sizes(grid, width, height, max_tokens), *_refused()]


def scene(width: int, height: int) -> np.ndarray[Any, Any]:
    """Draw [height, width, 3] uint8 that no rotation or mirroring leaves alone.

    Red grows to the right, green downwards; blue is a checkerboard with sharp edges, which chroma subsampling blurs.
    """
    x, y = np.arange(width), np.arange(height)[:, None]
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    pixels[..., 0] = x * 255 // max(1, width - 1)
    pixels[..., 1] = y * 255 // max(1, height - 1)
    pixels[..., 2] = ((x // 8 % 2).astype(np.uint8) ^ (y // 8 % 2).astype(np.uint8)) * 200
    return pixels


def encode(pixels: np.ndarray[Any, Any] | Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    """Encode pixels as a file; `options` are those of Pillow."""
    picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    buffer = io.BytesIO()
    picture.save(buffer, format=file_format, **options)
    return buffer.getvalue()


def _pngs(width: int, height: int) -> list[PictureCase]:
    rgb = scene(width, height)
    red, grey = rgb[..., 0], rgb[..., 1]
    wide = rgb.astype(np.uint16) * 256 + rgb[..., ::-1]
    palette = _palette_picture(width, height)
    return [
        PictureCase("png_rgb", "8-bit RGB on the grid: passes byte for byte", encode(rgb)),
        PictureCase("png_interlaced", "8-bit RGB in seven passes (Adam7)", _png_by_hand(rgb, interlaced=True)),
        PictureCase(
            "png_icc", "a colour profile that swaps red and blue", encode(rgb, icc_profile=_swapping_profile())
        ),
        PictureCase("png_rgb_16_bit", "16 bits per channel", _png_by_hand(wide, interlaced=False)),
        PictureCase("png_rgba", "alpha from 0 to 255", encode(np.dstack([rgb, red]))),
        PictureCase("png_grey", "8-bit grey", encode(grey)),
        PictureCase("png_grey_alpha", "grey and alpha (LA)", encode(np.dstack([grey, red]))),
        PictureCase("png_grey_16_bit", "16-bit grey", encode(wide[..., 0])),
        PictureCase("png_1_bit", "black and white", encode(Image.fromarray(rgb).convert("1"))),
        PictureCase("png_palette", "four colours", encode(palette)),
        PictureCase(
            "png_palette_alpha",
            "four colours, an alpha for each",
            encode(palette, transparency=_PALETTE_ALPHA),
        ),
    ]


def _others(width: int, height: int) -> list[PictureCase]:
    rgb = scene(width, height)
    picture = Image.fromarray(rgb)
    palette = _palette_picture(width, height)
    cases = [
        PictureCase(
            "jpeg_baseline", "chroma subsampled 4:2:0: passes byte for byte", encode(rgb, "JPEG", subsampling=2)
        ),
        PictureCase(
            "jpeg_progressive", "progressive, 4:2:0", encode(rgb, "JPEG", subsampling=2, progressive=True, quality=60)
        ),
        PictureCase("jpeg_grey", "one channel", encode(rgb[..., 1], "JPEG")),
        PictureCase("jpeg_cmyk", "four inks", encode(picture.convert("CMYK"), "JPEG")),
        PictureCase("gif_animated", "three frames: the first one counts", _animation(palette)),
        PictureCase("webp_lossy", "lossy WebP", encode(rgb, "WEBP", quality=80)),
        PictureCase(
            "webp_lossless", "lossless WebP with alpha", encode(np.dstack([rgb, rgb[..., 0]]), "WEBP", lossless=True)
        ),
    ]
    for orientation, stored in _STORED.items():
        exif = Image.Exif()
        exif[_EXIF_ORIENTATION] = orientation
        mirrored = " (mirrored)" if orientation in (2, 5) else ""
        cases.append(
            PictureCase(
                f"jpeg_exif_{orientation}",
                f"EXIF orientation {orientation}{mirrored}",
                encode(picture.transpose(stored), "JPEG", exif=exif, quality=95),
            )
        )
    return cases


def _sizes(grid: GridFit, width: int, height: int, max_tokens: int) -> list[PictureCase]:
    factor = grid.factor
    fewest = math.ceil(grid.min_pixels / factor**2)
    most = max(fewest, min(grid.max_pixels // factor**2, max_tokens))
    smallest, largest = _rectangle(fewest, 1), _rectangle(most, -1)
    above = [math.ceil(side * math.sqrt(1.5)) + 1 for side in _rectangle(grid.max_pixels // factor**2, -1)]
    noise = np.random.default_rng(0).integers(0, 256, size=(height - 3, width + 5, 3), dtype=np.uint8)
    largest_about = (
        "at the model's largest size"
        if most * factor**2 > grid.max_pixels - factor**2
        else ("as large as inference.max_model_len allows")
    )
    return [
        PictureCase("off_grid", "neither side a multiple of the grid", encode(scene(width + 5, height - 7))),
        PictureCase("one_pixel", "1 x 1", encode(scene(1, 1))),
        PictureCase("tiny", "7 x 5", encode(scene(7, 5))),
        PictureCase("very_wide", "50 times as wide as high", encode(scene(50 * factor, factor))),
        PictureCase("very_tall", "50 times as high as wide", encode(scene(factor, 50 * factor))),
        PictureCase("at_min_pixels", "at the model's smallest size", encode(scene(*_times(smallest, factor)))),
        PictureCase("at_max_pixels", largest_about, encode(scene(*_times(largest, factor)))),
        PictureCase(
            "above_max_pixels",
            "half as large again as the model's largest size",
            encode(scene(*_times((above[0], above[1]), factor))),
        ),
        PictureCase("flat", "one colour", encode(np.full((height, width, 3), (200, 30, 90), dtype=np.uint8))),
        PictureCase("noise", "random pixels off the grid: a resize shows the most", encode(noise)),
    ]


def _refused() -> list[PictureCase]:
    jpeg = encode(scene(64, 48), "JPEG")
    return [
        PictureCase("cut_jpeg", "the second half is missing", jpeg[: len(jpeg) // 2], refusal="truncated"),
        PictureCase(
            "web_page", "HTML instead of a picture", b"<!DOCTYPE html><p>not found</p>", refusal="not_an_image"
        ),
    ]


def _rectangle(num_tokens: int, step: int) -> tuple[int, int]:
    """Return (columns, rows) of the nearest number of tokens, up or down by `step`, that makes a fair rectangle."""
    for count in itertools.count(num_tokens, step):
        for rows in range(math.isqrt(count), 0, -1):
            if count % rows == 0 and count // rows <= _MAX_ASPECT * rows:
                return count // rows, rows
    raise AssertionError("one token is a square")


def _times(sides: tuple[int, int], factor: int) -> tuple[int, int]:
    return sides[0] * factor, sides[1] * factor


def _palette_picture(width: int, height: int) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    picture = Image.frombytes("P", (width, height), ((x // 9 + y // 5) % 4).astype(np.uint8).tobytes())
    picture.putpalette(_PALETTE.tobytes())
    return picture


def _animation(first: Image.Image) -> bytes:
    others = [first.transpose(stored) for stored in (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180)]
    return encode(first, "GIF", save_all=True, append_images=others, duration=100)


def _swapping_profile() -> bytes:
    """Return an RGB profile under which red and blue change places: whoever applies it shows other pixels."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    profile[24:36] = bytes(12)  # when it was made, which is now
    for swapped in ((b"rXYZ", b"bXYZ"), (b"rTRC", b"bTRC")):
        at = [profile.index(tag, 128) for tag in swapped]
        profile[at[0] : at[0] + 4], profile[at[1] : at[1] + 4] = swapped[1], swapped[0]
    return bytes(profile)


def _png_by_hand(pixels: np.ndarray[Any, Any], *, interlaced: bool) -> bytes:
    """Write [H, W, 3] uint8 or uint16 as a PNG of a kind that Pillow only reads."""
    big_endian = pixels.astype(pixels.dtype.newbyteorder(">"))
    passes = _ADAM7 if interlaced else ((0, 0, 1, 1),)
    rows = b"".join(
        b"\0" + row.tobytes() for y, x, down, right in passes for row in big_endian[y::down, x::right] if row.size
    )
    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8 * pixels.itemsize, 2, 0, 0, interlaced)
    return _png_chunks([(b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b"")])


def _png_chunks(chunks: Sequence[tuple[bytes, bytes]]) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
