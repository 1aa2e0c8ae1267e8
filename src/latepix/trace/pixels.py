"""Pixels of every kind -> 8-bit RGB.

In: a decoded PIL picture of any mode, or a numpy array. Out: a PIL picture of mode RGB, opaque, with nothing in its
`info`. The rules, each of them a function of the pixels (and of what the file says about them) alone:

* transparency of every kind lies over white;
* 16 bits per channel keep their high byte, in grey as in color (so do 12-bit TIFFs, by their own depth): scaled,
  never clipped;
* floats in [0, 1] become [0, 255]; floats outside it span the range from their smallest to their largest value;
* 32-bit integers are read as 8-bit values if they all are, else as 16-bit values if they all are, else from their
  smallest to their largest value; a file that says it has 16 bits is read as 16 bits;
* a TIFF whose zero is white is inverted;
* CMYK and YCCK, palettes, YCbCr, HSV and LAB (to sRGB) are converted as Pillow does, and so as vLLM does;
* ICC profiles and gamma are ignored, as vLLM and the Hugging Face processors ignore them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from latepix.errors import ImageError

#: Channels of an array: grey, RGB, RGBA.
ARRAY_CHANNELS = (1, 3, 4)
_WITH_ALPHA = frozenset({"LA", "La", "PA", "RGBA", "RGBa"})
_PLAIN = frozenset({"1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"})
_INTEGER = frozenset({"I", "I;16", "I;16L", "I;16B", "I;16N"})
#: Files whose 32-bit integers hold 16-bit samples, however small they are.
_FORMATS_OF_16_BITS = frozenset({"PNG", "PPM"})
_TIFF_BITS, _TIFF_PHOTOMETRIC, _TIFF_SAMPLE_FORMAT = 258, 262, 339
_WHITE_IS_ZERO, _UNSIGNED = 0, (1,)
#: Pixels that are scaled together: bounds the memory of intermediate values.
_BAND_PIXELS = 1 << 20


def picture_to_rgb(picture: Image.Image, *, png_depth: int | None = None) -> Image.Image:
    """Convert a decoded picture to opaque 8-bit RGB; the picture itself is left alone.

    Args:
        picture: of any mode.
        png_depth: bits per sample that the header of a PNG names; its transparent color is told in them.
    Raises:
        ImageError: `unsupported_mode`, or `bad_values` for NaN and infinity.
    """
    mode = picture.mode
    if mode in _INTEGER or mode == "F":
        return Image.fromarray(_scale_wide(picture)).convert("RGB")
    if mode in _WITH_ALPHA or (mode in _PLAIN and "transparency" in picture.info):
        rgb = _over_white(picture, png_depth)
    elif mode in _PLAIN:
        rgb = picture.convert("RGB")  # a copy, if it is RGB already
    else:
        raise ImageError(
            f"The picture has pixels of mode {mode[:24]}, which has no fixed meaning in 8-bit RGB. Convert it to RGB "
            "first.",
            "unsupported_mode",
        )
    rgb.info = {}
    return rgb


def array_to_rgb(array: np.ndarray[Any, Any]) -> Image.Image:
    """Convert an array to opaque 8-bit RGB.

    Args:
        array: [H, W], [H, W, 1] (grey), [H, W, 3] (RGB) or [H, W, 4] (RGBA); uint8, uint16, or floats in [0, 1].
    Raises:
        ImageError: `unsupported_array`, or `bad_values` for floats outside [0, 1].
    """
    shape, dtype = tuple(array.shape), array.dtype
    if array.ndim not in (2, 3) or (array.ndim == 3 and shape[2] not in ARRAY_CHANNELS):
        raise ImageError(
            f"The array has the shape {shape}; wanted [height, width], or [height, width, channels] with 1, 3 or 4 "
            "channels. Move the channels to the end, or pass one picture at a time.",
            "unsupported_array",
        )
    if dtype.kind == "u" and dtype.itemsize == 1:
        pixels = array
    elif dtype.kind == "u" and dtype.itemsize == 2:
        pixels = _by_bands(array, lambda band: band >> 8)
    elif dtype.kind == "f":
        if array.size and not (np.min(array) >= 0 and np.max(array) <= 1):
            raise ImageError(
                f"The array of {dtype} has values outside [0, 1] or NaN. Scale it to [0, 1], or pass uint8.",
                "bad_values",
            )
        pixels = _by_bands(array, lambda band: np.floor(band.astype(np.float64) * 255 + 0.5))
    else:
        raise ImageError(
            f"The array has values of type {dtype}; wanted uint8, uint16, or floats in [0, 1].", "unsupported_array"
        )
    pixels = np.ascontiguousarray(pixels[..., 0] if pixels.ndim == 3 and shape[2] == 1 else pixels)
    return picture_to_rgb(Image.fromarray(pixels))


def _over_white(picture: Image.Image, png_depth: int | None) -> Image.Image:
    if "transparency" in picture.info and picture.mode in ("L", "RGB"):
        picture = picture.copy()
        picture.info["transparency"] = _color_key(picture.info["transparency"], picture.mode, png_depth)
    # Pillow converts premultiplied grey to nothing but grey with alpha.
    picture = (picture.convert("LA") if picture.mode == "La" else picture).convert("RGBA")
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, picture).convert("RGB")


def _color_key(key: Any, mode: str, png_depth: int | None) -> Any:
    """Return the transparent color of a PNG in the 8 bits of the decoded pixels; Pillow leaves it in the file's."""
    if mode == "L" and png_depth in (2, 4) and isinstance(key, int):
        return key * (255 // (2**png_depth - 1))
    if mode == "RGB" and png_depth == 16 and isinstance(key, tuple):
        return tuple(value >> 8 for value in key)
    return key


def _scale_wide(picture: Image.Image) -> np.ndarray[Any, Any]:
    """Return [H, W] uint8 of a picture with one channel of more than 8 bits."""
    values = np.asarray(picture)
    tags = getattr(picture, "tag_v2", {})
    if picture.mode == "F":
        grey = _scale_floats(values)
    elif picture.mode == "I":
        if tags.get(_TIFF_BITS) == (32,) and tags.get(_TIFF_SAMPLE_FORMAT) == _UNSIGNED:
            values = values.view(np.uint32)  # Pillow knows signed ones only
        grey = _scale_integers(values, bits=16 if picture.format in _FORMATS_OF_16_BITS else None)
    else:
        grey = _scale_integers(values, bits=12 if tags.get(_TIFF_BITS) == (12,) else 16)
    if tags.get(_TIFF_PHOTOMETRIC) == _WHITE_IS_ZERO:
        grey = 255 - grey
    key = picture.info.get("transparency")
    if isinstance(key, int):
        grey[values == key] = 255
    return grey


def _scale_integers(values: np.ndarray[Any, Any], *, bits: int | None) -> np.ndarray[Any, Any]:
    if bits is None:
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > 0xFFFF:
            return _stretch(values, low, high)
        bits = 8 if high <= 0xFF else 16
    return _by_bands(values, lambda band: np.minimum(band >> (bits - 8), 255))


def _scale_floats(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    low, high = float(values.min()), float(values.max())
    if not np.isfinite([low, high]).all():  # NaN anywhere makes both of them NaN
        raise ImageError(
            "The picture has float pixels that are NaN or infinite. Fill them with a value first.", "bad_values"
        )
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    return _stretch(values, low, high)


def _stretch(values: np.ndarray[Any, Any], low: float, high: float) -> np.ndarray[Any, Any]:
    """Map [low, high] to [0, 255]; a picture of one value keeps it as far as 8 bits go."""
    if low == high:
        return np.full(values.shape, int(min(max(low, 0), 255) + 0.5), dtype=np.uint8)
    return _by_bands(values, lambda band: np.floor((band.astype(np.float64) - low) / (high - low) * 255 + 0.5))


def _by_bands(
    values: np.ndarray[Any, Any], scale: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
) -> np.ndarray[Any, Any]:
    """Apply `scale` to some rows at a time; it must return values in [0, 255]."""
    scaled = np.empty(values.shape, dtype=np.uint8)
    step = max(1, _BAND_PIXELS // max(1, values[:1].size))
    for row in range(0, len(values), step):
        scaled[row : row + step] = scale(values[row : row + step])
    return scaled
