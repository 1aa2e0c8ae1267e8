"""The bytes of a file, a PIL picture or an array -> upright, opaque 8-bit RGB, or an `ImageError` with a reason.

Whatever Pillow raises for hostile bytes leaves this module as an `ImageError`. Nothing is decoded before its size is
known to be within the limits. What cannot be noticed is damage inside the data of a JPEG: its decoder fills it up.
"""

from __future__ import annotations

import io
import re
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from latepix.errors import ImageError
from latepix.trace.formats import ALLOWED_FORMATS, RUNS_PROGRAMS, describe_unknown, is_allowed_format
from latepix.trace.pixels import ARRAY_CHANNELS, array_to_rgb, picture_to_rgb

#: Formats that pass through byte for byte when the picture is already canonical.
PASS_THROUGH = {"PNG": "image/png", "JPEG": "image/jpeg"}
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
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
#: Pillow quotes bytes of the file in some of its messages.
_QUOTED_BYTES = re.compile(r"b(['\"]).*", re.DOTALL)


class ImageLimits(msgspec.Struct, frozen=True):
    """What ingress accepts. Beyond a limit the picture is refused, never silently changed.

    Attributes:
        max_bytes: size of the encoded source file.
        max_pixels: width x height of the source, checked before it is decoded. Pillow itself refuses more than
            178,956,970.
        max_aspect_ratio: longer side over shorter side.
    """

    max_bytes: int = 20_000_000
    max_pixels: int = 50_000_000
    max_aspect_ratio: float = 200.0

    def check_bytes(self, num_bytes: int) -> None:
        """Raise `too_many_bytes` if a file of this size is over the limit."""
        if num_bytes > self.max_bytes:
            raise ImageError(
                f"The picture has {num_bytes} bytes, the limit is {self.max_bytes} (images.max_bytes). "
                "Send a smaller file or raise the limit.",
                "too_many_bytes",
            )

    def check_size(self, width: int, height: int) -> None:
        """Raise `not_an_image`, `too_many_pixels` or `aspect_ratio` if a picture of this size is out of bounds."""
        if min(width, height) < 1:
            raise ImageError(f"The picture is {width} x {height}: it has no pixels.", "not_an_image")
        if width * height > self.max_pixels:
            raise ImageError(
                f"The picture is {width} x {height} = {width * height} pixels, the limit is {self.max_pixels} "
                "(images.max_pixels). Send a smaller picture or raise the limit.",
                "too_many_pixels",
            )
        if max(width, height) > self.max_aspect_ratio * min(width, height):
            raise ImageError(
                f"The picture is {width} x {height}; one side may be at most {self.max_aspect_ratio:g} times the "
                "other (images.max_aspect_ratio). Crop it or raise the limit.",
                "aspect_ratio",
            )


class Decoded(msgspec.Struct, frozen=True):
    """A decoded picture.

    Attributes:
        picture: upright, opaque, mode RGB, without `info`.
        num_frames: of the source; `picture` is the first.
        media_type: of the source file if it may stand for the picture as it is, else None.
    """

    picture: Image.Image
    num_frames: int = 1
    media_type: str | None = None


def decode_file(data: bytes, limits: ImageLimits) -> Decoded:
    """Decode the first frame of an image file.

    Raises:
        ImageError: with the reasons that `ingest_image` lists.
    """
    limits.check_bytes(len(data))
    with _decoding(f"The picture of {len(data)} bytes") as remarks, _open(data) as picture:
        limits.check_size(*picture.size)
        if picture.format == "PNG":
            _check_png(data)
        picture.load()
        # Only now: TIFF files turn themselves, and a PNG may state its orientation behind its pixels.
        orientation = _orientation(picture)
        media_type = None
        if _is_canonical(picture, orientation, data):
            media_type = PASS_THROUGH[str(picture.format)]
            picture.info = {}
            rgb: Image.Image = picture  # no copy: a server does this for every picture of every request
        else:
            png_depth = data[24] if picture.format == "PNG" else None
            rgb = _upright(picture_to_rgb(picture, png_depth=png_depth), orientation)
        # Last, because it may move the picture to another frame.
        num_frames = _count_pages(data) if picture.format == "TIFF" else _count_frames(picture)
        # A file that Pillow remarks on may look different to another version of it.
        return Decoded(rgb, num_frames, media_type if num_frames == 1 and not remarks else None)


def decode_picture(picture: Image.Image, limits: ImageLimits) -> Decoded:
    """Convert a PIL picture, at the frame where it stands; the picture itself is left alone.

    Raises:
        ImageError: with the reasons that `ingest_image` lists.
    """
    limits.check_size(*picture.size)
    if picture.format in RUNS_PROGRAMS:
        raise ImageError(
            f"{picture.format} pictures are refused: decoding them needs programs outside Pillow. Hand over a copy in "
            "PNG.",
            "unsupported_format",
        )
    with _decoding(f"The PIL picture ({picture.width} x {picture.height}, mode {picture.mode})"):
        picture.load()
        rgb = _upright(picture_to_rgb(picture), _orientation(picture))
        try:
            num_frames = _count_frames(picture)
        except Exception:
            num_frames = 1  # its owner has closed the file
        return Decoded(rgb, num_frames)


def decode_array(array: np.ndarray[Any, Any], limits: ImageLimits) -> Decoded:
    """Convert an array of pixels (see `pixels.array_to_rgb`).

    Raises:
        ImageError: with the reasons that `ingest_image` lists.
    """
    if array.ndim == 2 or (array.ndim == 3 and array.shape[2] in ARRAY_CHANNELS):
        limits.check_size(array.shape[1], array.shape[0])
    with _decoding(f"The array of shape {array.shape}"):
        return Decoded(array_to_rgb(array))


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=list(ALLOWED_FORMATS))
    except UnidentifiedImageError as error:
        if is_allowed_format(data):
            raise ValueError("its header is damaged") from error
        reason, words = describe_unknown(data)
        raise ImageError(
            f"These {len(data)} bytes are {words}. Allowed formats: {', '.join(ALLOWED_FORMATS)}.", reason
        ) from error


@contextmanager
def _decoding(what: str) -> Generator[list[str]]:
    """Make every error of Pillow an `ImageError`: for hostile bytes, it raises errors of any kind.

    Yields:
        The warnings of Pillow about the picture so far.
    """
    try:
        with _strict_pillow() as remarks:
            yield remarks
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(f"{what} is refused: {str(error)[:120]} Send a smaller picture.", "too_many_pixels") from error
    except MemoryError as error:
        raise ImageError(
            f"{what} needs more memory than there is. Send a smaller picture.", "too_many_pixels"
        ) from error
    except Exception as error:
        detail = _QUOTED_BYTES.sub("...", f"{type(error).__name__}: {error}")[:120]
        raise ImageError(
            f"{what} cannot be decoded to its end ({detail}). It is truncated, damaged, or of an unusual kind; write "
            "it again as PNG.",
            "truncated",
        ) from error


_lock = threading.Lock()
_num_inside = 0
_before: tuple[warnings.catch_warnings[Any], bool] | None = None
_this_thread = threading.local()


@contextmanager
def _strict_pillow() -> Generator[list[str]]:
    """Collect Pillow's warnings of this thread, and forbid it to fill up truncated files.

    Both are settings of the whole process. They are changed by the first thread that comes in and put back by the last
    one that leaves, so that threads do not undo each other's.
    """
    global _num_inside, _before
    with _lock:
        if _num_inside == 0:
            caught = warnings.catch_warnings()
            caught.__enter__()
            _before = caught, ImageFile.LOAD_TRUNCATED_IMAGES
            warnings.simplefilter("always")
            warnings.showwarning = _collect(warnings.showwarning)  # ty: ignore[invalid-assignment]
            ImageFile.LOAD_TRUNCATED_IMAGES = False
        _num_inside += 1
    _this_thread.remarks = []
    try:
        yield _this_thread.remarks
    finally:
        _this_thread.remarks = None
        with _lock:
            _num_inside -= 1
            if _num_inside == 0 and _before is not None:
                _before[0].__exit__(None, None, None)
                ImageFile.LOAD_TRUNCATED_IMAGES = _before[1]  # ty: ignore[invalid-assignment]


def _collect(show: Callable[..., None]) -> Callable[..., None]:
    def collect(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        remarks = getattr(_this_thread, "remarks", None)
        if remarks is None:  # a thread that decodes nothing here
            show(message, category, *where, **more)
        elif not issubclass(category, Image.DecompressionBombWarning):  # our own limit is the one that counts
            remarks.append(str(message))

    return collect


def _check_png(data: bytes) -> None:
    """Raise unless every chunk up to IEND is there and fits its checksum: Pillow reads pixels without checking."""
    at = len(_PNG_SIGNATURE)
    while True:
        length, kind = struct.unpack(">I4s", data[at : at + 8].ljust(8, b"\xff"))
        checksum = data[at + 8 + length : at + 12 + length]
        if len(checksum) < 4:
            raise ValueError("the PNG ends before its IEND chunk")
        if zlib.crc32(memoryview(data)[at + 4 : at + 8 + length]).to_bytes(4, "big") != checksum:
            raise ValueError("a PNG chunk does not fit its checksum")
        if kind == b"IEND":
            return
        at += 12 + length


def _count_frames(picture: Image.Image) -> int:
    return max(1, int(getattr(picture, "n_frames", 1)))


def _count_pages(data: bytes) -> int:
    """Count the pages of a TIFF. Pillow compares each with all before it, which takes hours for a hostile file."""
    order = "<" if data.startswith(b"II") else ">"
    is_big = struct.unpack_from(f"{order}H", data, 2)[0] == 43
    at, count, entry_bytes, offset = (8, f"{order}Q", 20, f"{order}Q") if is_big else (4, f"{order}H", 12, f"{order}I")
    pages: set[int] = set()
    try:
        while (page := struct.unpack_from(offset, data, at)[0]) and page not in pages:
            at = page + struct.calcsize(count) + entry_bytes * struct.unpack_from(count, data, page)[0]
            pages.add(page)
    except (struct.error, OverflowError):
        pass  # the chain leaves the file
    return max(1, len(pages))


def _orientation(picture: Image.Image) -> int | None:
    """Return the EXIF orientation, 1 where there is none, None where it cannot be read."""
    try:
        orientation = int(picture.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:
        # A damaged EXIF block says nothing about the pixels: Pillow raises all kinds of errors for it.
        return None
    return orientation if orientation in _UPRIGHT else 1


def _upright(picture: Image.Image, orientation: int | None) -> Image.Image:
    return picture.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else picture


def _is_canonical(picture: Image.Image, orientation: int | None, data: bytes) -> bool:
    """Return whether the file of a loaded picture holds three opaque, upright channels of 8 bits."""
    return (
        picture.format in PASS_THROUGH
        and orientation == 1
        and picture.mode == "RGB"
        and "transparency" not in picture.info
        # Pillow shows 16 bits per channel as RGB too; the depth is byte 24 of a PNG.
        and (picture.format != "PNG" or (data[12:16] == b"IHDR" and data[24] == 8))
    )
