"""Any picture a user has -> one canonical inline form, the only form that exists behind this door.

In: a data URL, raw bytes, or a PIL image. Out: an `InlineImage`: 8-bit RGB (or the untouched bytes, if they already
are canonical), upright, opaque, on the grid of the model's family. Because nothing behind this point has to rotate,
composite or resize, the server and the trainer cannot disagree about the pixels. What holds:

* the same source always gives the same bytes, hence the same `sha256`;
* a canonical picture passes through byte for byte;
* a picture that cannot be trusted is an `ImageError` with a stable `reason`, never a guess.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import re
import struct
import warnings
import zlib
from typing import TypeAlias

import msgspec
from PIL import Image, UnidentifiedImageError

from latepix.errors import ImageError

ImageSource: TypeAlias = "str | bytes | Image.Image"

#: Formats decoded at the door. Everything else (EPS and WMF start other programs) is refused by name.
ALLOWED_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
#: Modes with channels of 8 bits or less. Others would be clipped, not scaled.
_MODES = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"})
#: Formats that pass through byte for byte when the picture is already canonical.
_PASS_THROUGH = {"PNG": "image/png", "JPEG": "image/jpeg"}
_EXIF_ORIENTATION = 0x0112
#: Orientation of the stored pixels -> what makes them upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
#: What Pillow's decoders raise for damaged files.
_DECODE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, struct.error, zlib.error)
#: The processors of the Qwen families refuse a longer side than this many times the shorter one.
_MAX_ASPECT = 200
#: Passes of a processor's rule until a size stays; six are the most seen.
_MAX_PASSES = 100
_DATA_URL = re.compile(r"data:(?P<media>[^;,]*)(?P<parameters>(?:;[^;,]*)*),", re.IGNORECASE)


class InlineImage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One canonical picture, as it is stored in conversations and sent on the wire.

    Attributes:
        sha256: hex digest of `data`; pictures are compared and stored by it.
        media_type: `image/png` or `image/jpeg`.
        width, height: pixels after decoding.
        data: the encoded file (PNG or JPEG), not base64. Empty only inside a trace file, where the picture lies
            beside it (`trace/store.py`).
    """

    sha256: str
    media_type: str
    width: int
    height: int
    data: bytes = b""

    @property
    def url(self) -> str:
        """The picture as a data URL in strict base64."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode('ascii')}"

    @property
    def num_bytes(self) -> int:
        """Size of the encoded file in bytes."""
        return len(self.data)

    def open(self) -> Image.Image:
        """Decode to an RGB PIL image of size (`width`, `height`)."""
        picture = Image.open(io.BytesIO(self.data), formats=list(_PASS_THROUGH))
        return picture if picture.mode == "RGB" else picture.convert("RGB")


class GridFit(msgspec.Struct, frozen=True):
    """The picture sizes a family's processor leaves alone.

    Attributes:
        factor: width and height are multiples of this many pixels (patch x merge).
        min_pixels, max_pixels: bounds of width x height.
    """

    factor: int
    min_pixels: int
    max_pixels: int

    def processed_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the (width, height) that the family's processor resizes a picture to (`smart_resize`)."""
        factor = self.factor
        new_w, new_h = round(width / factor) * factor, round(height / factor) * factor
        if new_w * new_h > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            new_w = max(factor, math.floor(width / shrink / factor) * factor)
            new_h = max(factor, math.floor(height / shrink / factor) * factor)
        elif new_w * new_h < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            new_w = math.ceil(width * grow / factor) * factor
            new_h = math.ceil(height * grow / factor) * factor
        return new_w, new_h

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return an allowed (width, height) near the given one: the processor leaves it as it is.

        Rounding can make a narrow picture too large or too narrow for the processor again, so its rule is applied
        until it changes nothing.
        """
        size = _within_aspect(width, height)
        for _ in range(_MAX_PASSES):
            fitted = _within_aspect(*self.processed_size(*size))
            if fitted == size:
                break
            size = fitted
        return size


class ImageLimits(msgspec.Struct, frozen=True):
    """What ingress accepts. Beyond a limit the picture is refused, never silently changed.

    Attributes:
        max_bytes: size of the encoded source file.
        max_pixels: width x height of the source, checked before it is decoded.
        max_aspect_ratio: longer side over shorter side.
    """

    max_bytes: int = 20_000_000
    max_pixels: int = 50_000_000
    max_aspect_ratio: float = 200.0


def ingest_image(source: ImageSource, *, limits: ImageLimits | None = None, fit: GridFit | None = None) -> InlineImage:
    """Turn a picture into its canonical inline form.

    Args:
        source: a `data:` URL, the bytes of an image file, or a PIL image.
        limits: bounds on bytes, pixels and aspect ratio; None means the defaults of `ImageLimits`.
        fit: the grid of the model's family; None leaves the size as it is.
    Returns:
        The canonical picture; the very same bytes if `source` already was one.
    Raises:
        ImageError: with `reason` one of `bad_base64`, `unsupported_source`, `not_an_image`, `unsupported_format`,
            `unsupported_mode`, `truncated`, `too_many_bytes`, `too_many_pixels`, `aspect_ratio`.
    """
    limits = limits or ImageLimits()
    if isinstance(source, Image.Image):
        return _canonical(source, None, limits, fit)
    if isinstance(source, str):
        source = _data_url_bytes(source, limits)
    elif isinstance(source, (bytearray, memoryview)):
        source = bytes(source)
    elif not isinstance(source, bytes):
        raise ImageError(
            f"Cannot take a picture from {type(source).__name__}; hand over a data URL, the bytes of an image file, "
            "or a PIL image.",
            "unsupported_source",
        )
    _check_bytes(len(source), limits)
    with _open(source) as picture:
        return _canonical(picture, source, limits, fit)


def _within_aspect(width: int, height: int) -> tuple[int, int]:
    return min(width, _MAX_ASPECT * height), min(height, _MAX_ASPECT * width)


def _check_bytes(num_bytes: int, limits: ImageLimits) -> None:
    if num_bytes > limits.max_bytes:
        raise ImageError(
            f"The picture has {num_bytes} bytes, the limit is {limits.max_bytes} (images.max_bytes). "
            "Send a smaller file or raise the limit.",
            "too_many_bytes",
        )


def _data_url_bytes(url: str, limits: ImageLimits) -> bytes:
    match = _DATA_URL.match(url)
    if match is None:
        raise ImageError(
            f"Expected a data URL, got text that starts with {url[:24]!r}. Only inline pictures "
            "(data:image/...;base64,...) are taken here.",
            "unsupported_source",
        )
    if "base64" not in match["parameters"].lower().split(";"):
        raise ImageError("The data URL is not base64; write data:image/png;base64,...", "bad_base64")
    payload = url[match.end() :]
    _check_bytes(len(payload) * 3 // 4 - 2, limits)
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(
            f"The data URL does not hold strict base64 ({error}). Encode it with base64.b64encode, "
            "without line breaks or URL-safe letters.",
            "bad_base64",
        ) from error


def _open(data: bytes) -> Image.Image:
    try:
        with warnings.catch_warnings():
            # Our own pixel limit is checked from the header; Pillow's warning would only repeat it.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(data), formats=list(ALLOWED_FORMATS))
    except Image.DecompressionBombError as error:
        raise ImageError(f"The picture is a decompression bomb: {error}", "too_many_pixels") from error
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        start = data[:4]
        if start.startswith((b"%!PS", b"\xd7\xcd\xc6\x9a")):
            raise ImageError(
                f"EPS and WMF pictures are refused: decoding them starts other programs. Allowed: "
                f"{', '.join(ALLOWED_FORMATS)}.",
                "unsupported_format",
            ) from error
        raise ImageError(
            f"These {len(data)} bytes (starting {start!r}) are not a picture in a known format "
            f"({', '.join(ALLOWED_FORMATS)}).",
            "not_an_image",
        ) from error


def _canonical(picture: Image.Image, data: bytes | None, limits: ImageLimits, fit: GridFit | None) -> InlineImage:
    width, height = picture.size
    _check_size(width, height, limits)
    if picture.mode not in _MODES:
        raise ImageError(
            f"The picture ({width} x {height}) has pixels of mode {picture.mode}, which has no fixed meaning in 8-bit "
            "RGB. Scale it to 8 bits per channel first.",
            "unsupported_mode",
        )
    orientation = _orientation(picture)
    if orientation in (5, 6, 7, 8):
        width, height = height, width
    size = fit.size(width, height) if fit else (width, height)
    try:
        passes = data is not None and orientation == 1 and size == picture.size and _is_canonical(picture, data)
        picture.load()
        if data is not None and passes:
            return _inline(data, _PASS_THROUGH[str(picture.format)], size)
        if orientation != 1:
            picture = picture.transpose(_UPRIGHT[orientation])
        picture = _opaque_rgb(picture)
    except _DECODE_ERRORS as error:
        raise ImageError(
            f"The picture ({width} x {height}, {picture.format}) cannot be decoded to its end: {error}. "
            "The file is truncated or damaged.",
            "truncated",
        ) from error
    if picture.size != size:
        picture = picture.resize(size, Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", compress_level=6)
    return _inline(buffer.getvalue(), "image/png", size)


def _is_canonical(picture: Image.Image, data: bytes) -> bool:
    """Return whether an opened, upright file may pass as it is: one opaque frame, three channels of 8 bits."""
    return (
        picture.format in _PASS_THROUGH
        and picture.mode == "RGB"
        and "transparency" not in picture.info
        and getattr(picture, "n_frames", 1) == 1
        # Pillow shows 16 bits per channel as RGB too; the depth is byte 24 of a PNG.
        and (picture.format != "PNG" or (data[12:16] == b"IHDR" and data[24] == 8))
    )


def _check_size(width: int, height: int, limits: ImageLimits) -> None:
    if width * height > limits.max_pixels:
        raise ImageError(
            f"The picture is {width} x {height} = {width * height} pixels, the limit is {limits.max_pixels} "
            "(images.max_pixels). Send a smaller picture or raise the limit.",
            "too_many_pixels",
        )
    if min(width, height) < 1 or max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise ImageError(
            f"The picture is {width} x {height}; one side may be at most {limits.max_aspect_ratio:g} times the other "
            "(images.max_aspect_ratio). Crop it or raise the limit.",
            "aspect_ratio",
        )


def _orientation(picture: Image.Image) -> int:
    try:
        orientation = int(picture.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:
        # A damaged EXIF block says nothing about the pixels: Pillow raises all kinds of errors for it.
        return 1
    return orientation if orientation in _UPRIGHT else 1


def _opaque_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        # Pillow converts premultiplied grey to nothing but grey with alpha.
        picture = (picture.convert("LA") if picture.mode == "La" else picture).convert("RGBA")
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, picture).convert("RGB")
    return picture.convert("RGB")


def _inline(data: bytes, media_type: str, size: tuple[int, int]) -> InlineImage:
    return InlineImage(
        data=data, media_type=media_type, width=size[0], height=size[1], sha256=hashlib.sha256(data).hexdigest()
    )
