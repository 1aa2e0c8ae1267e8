"""Any picture a user has -> one canonical inline form, the only form that exists behind this door.

In: a data URL, the bytes of a file, a PIL picture, a numpy array, a content part of a chat API, or (where `ImageAccess`
allows it) a path or URL. Out: an `InlineImage`: 8-bit RGB (or the untouched bytes, if they already are canonical),
upright, opaque, on the grid of the model's family. Because nothing behind this point has to rotate, composite or
resize, the server and the trainer cannot disagree about the pixels. What holds:

* the same source always gives the same bytes, hence the same `sha256`;
* a canonical picture passes through byte for byte;
* a picture that cannot be trusted is an `ImageError` with a stable `reason`, never a guess.

The way of a picture: `sources` (every form -> bytes, PIL or array; `fetch` for paths and URLs), `decode` (-> upright
RGB, by the rules of `pixels`), then one resize to the grid and one PNG, here.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np
from PIL import Image

from latepix.trace.decode import PASS_THROUGH, Decoded, ImageLimits, decode_array, decode_file, decode_picture
from latepix.trace.fetch import ImageAccess
from latepix.trace.sources import load_source

__all__ = ["GridFit", "ImageAccess", "ImageLimits", "ImageSource", "InlineImage", "ingest_image"]

_Buffer: TypeAlias = bytes | bytearray | memoryview
ImageSource: TypeAlias = (
    "str | _Buffer | os.PathLike[str] | Image.Image | np.ndarray[Any, Any] | Mapping[str, Any] | InlineImage"
)

#: The processors of the Qwen families refuse a longer side than this many times the shorter one.
_MAX_ASPECT = 200
#: Passes of a processor's rule until a size stays; six are the most seen.
_MAX_PASSES = 100


class InlineImage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One canonical picture, as it is stored in conversations and sent on the wire.

    Attributes:
        sha256: hex digest of `data`; pictures are compared and stored by it.
        media_type: `image/png` or `image/jpeg`.
        width, height: pixels after decoding.
        data: the encoded file (PNG or JPEG), not base64. Empty only inside a trace file, where the picture lies
            beside it (`trace/store.py`).
        num_frames: frames or pages of the source; above 1, this is the first of them.
    """

    sha256: str
    media_type: str
    width: int
    height: int
    data: bytes = b""
    num_frames: int = 1

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
        picture = Image.open(io.BytesIO(self.data), formats=list(PASS_THROUGH))
        return picture if picture.mode == "RGB" else picture.convert("RGB")


class GridFit(msgspec.Struct, frozen=True):
    """The picture sizes a family's processor leaves alone; this one rounds to a grid (Qwen).

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


class PaddedGridFit(GridFit, frozen=True, kw_only=True):
    """A processor that shrinks to its limits, and pads to the grid on the right and below (Kimi).

    Attributes:
        patch: pixels per side of a patch.
        max_patches: of a picture, in whole patches before padding.
        max_side_patches: of its longer side.
    """

    patch: int
    max_patches: int
    max_side_patches: int

    def processed_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the (width, height) that a picture has after shrinking and padding (`navit_resize`)."""
        side = self.max_side_patches * self.patch
        patches = max(1, width // self.patch) * max(1, height // self.patch)
        scale = min(1.0, math.sqrt(self.max_patches / patches), side / height, side / width)
        new_w, new_h = (min(side, max(1, int(length * scale))) for length in (width, height))
        return -(-new_w // self.factor) * self.factor, -(-new_h // self.factor) * self.factor

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return a (width, height) on the grid near the given one, within the limits: nothing is resized or padded."""
        most = self.max_side_patches * self.patch // self.factor
        cells = self.max_patches * self.patch**2 // self.factor**2
        scale = min(1.0, math.sqrt(cells * self.factor**2 / (width * height)), most * self.factor / max(width, height))
        columns, rows = (min(most, max(1, round(length * scale / self.factor))) for length in (width, height))
        while columns * rows > cells:
            columns, rows = (columns - 1, rows) if columns >= rows else (columns, rows - 1)
        return columns * self.factor, rows * self.factor


def ingest_image(
    source: ImageSource,
    *,
    limits: ImageLimits | None = None,
    fit: GridFit | None = None,
    access: ImageAccess | None = None,
) -> InlineImage:
    """Turn a picture into its canonical inline form.

    Args:
        source: one of

            * a `data:` URL in strict base64, with any or no media type;
            * `bytes`, `bytearray` or `memoryview` of an image file (PNG, JPEG, WEBP, GIF, BMP, TIFF, PPM);
            * a PIL picture, taken at the frame where it stands;
            * a numpy array [H, W] or [H, W, 1 | 3 | 4] of uint8, uint16, or floats in [0, 1];
            * a content part of OpenAI (`image_url`, `input_image`), Anthropic (`image` with a `source`), Hugging Face
              (`image`) or MCP (`image` with `data`); `detail` and the stated media type are ignored;
            * a path, a `file://` URL or an http(s) URL, where `access` allows it;
            * an `InlineImage`, which is checked again.
        limits: bounds on bytes, pixels and aspect ratio; None means the defaults of `ImageLimits`.
        fit: the grid of the model's family; None leaves the size as it is.
        access: folders and hosts that may be read; None means none.
    Returns:
        The canonical picture; the very same bytes if `source` already was one.
    Raises:
        ImageError: with `reason` one of

            * `unsupported_source`, `bad_base64`, `unsupported_array`: the form of the source is wrong;
            * `not_allowed`, `unreadable_file`, `fetch_failed`, `fetch_timeout`: a path or URL could not be read;
            * `not_an_image`, `unsupported_format`, `truncated` (or damaged): the file is wrong;
            * `unsupported_mode`, `bad_values`: its pixels have no meaning in 8-bit RGB;
            * `too_many_bytes`, `too_many_pixels`, `aspect_ratio`: it is over a limit.
    """
    limits = limits or ImageLimits()
    if isinstance(source, InlineImage):
        image = _canonical(decode_file(source.data, limits), source.data, fit)
        return msgspec.structs.replace(image, num_frames=source.num_frames)
    loaded = load_source(source, limits, access)
    if isinstance(loaded, bytes):
        return _canonical(decode_file(loaded, limits), loaded, fit)
    if isinstance(loaded, Image.Image):
        return _canonical(decode_picture(loaded, limits), b"", fit)
    return _canonical(decode_array(loaded, limits), b"", fit)


def _canonical(decoded: Decoded, data: bytes, fit: GridFit | None) -> InlineImage:
    """Return the file itself where it is canonical already; else resize once and encode as PNG."""
    picture, media_type = decoded.picture, decoded.media_type
    size = fit.size(*picture.size) if fit else picture.size
    if media_type is None or size != picture.size:
        if size != picture.size:
            picture = picture.resize(size, Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        picture.save(buffer, format="PNG", compress_level=6)
        data, media_type = buffer.getvalue(), "image/png"
    return InlineImage(
        sha256=hashlib.sha256(data).hexdigest(),
        media_type=media_type,
        width=size[0],
        height=size[1],
        data=data,
        num_frames=decoded.num_frames,
    )


def _within_aspect(width: int, height: int) -> tuple[int, int]:
    return min(width, _MAX_ASPECT * height), min(height, _MAX_ASPECT * width)
