"""Every form in which users hold a picture -> bytes of a file, a PIL picture or an array.

Content parts of chat APIs are unpacked here, data URLs are decoded, and paths and URLs are read where that is allowed.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from latepix.errors import ImageError
from latepix.trace.decode import ImageLimits
from latepix.trace.fetch import ImageAccess, fetch_url, read_file, shown

Loaded: TypeAlias = "bytes | Image.Image | np.ndarray[Any, Any]"

#: `type` of a mapping that holds a picture: parts of OpenAI (chat, responses), Hugging Face, Anthropic and MCP, and the
#: two kinds of Anthropic's `source`.
_PART_TYPES = frozenset({None, "image_url", "input_image", "image", "base64", "url"})
#: Keys that hold the picture in such a mapping; the value may be a mapping again.
_PART_KEYS = ("image_url", "image", "source", "url", "bytes", "path", "data", "base64")
#: Of these, a text under them is base64 without the header of a data URL.
_BASE64_KEYS = frozenset({"data", "base64"})
_MAX_DEPTH = 3
#: How base64 of PNG, JPEG, GIF and WEBP starts.
_BASE64_STARTS = ("iVBORw0K", "/9j/", "R0lGOD", "UklGR")
_FORMS = (
    "a data URL, the bytes of an image file, a PIL image, a numpy array, a content part such as "
    '{"type": "image_url", "image_url": {"url": ...}}, or a path or http(s) URL that the config allows'
)


def load_source(source: object, limits: ImageLimits, access: ImageAccess | None) -> Loaded:
    """Return what `decode` takes, for every form that `ingest_image` accepts.

    Raises:
        ImageError: `unsupported_source`, `bad_base64`, `too_many_bytes`, or a reason of `fetch`.
    """
    if isinstance(source, Mapping):
        return _load_part(source, limits, access, depth=1)
    if isinstance(source, str):
        return _load_text(source, limits, access)
    if isinstance(source, os.PathLike):
        return read_file(os.fspath(source), access, limits)
    if isinstance(source, (bytes, Image.Image, np.ndarray)):
        return source
    if isinstance(source, (bytearray, memoryview)):
        limits.check_bytes(memoryview(source).nbytes)
        return bytes(source)
    raise ImageError(f"Cannot take a picture from {type(source).__name__}; hand over {_FORMS}.", "unsupported_source")


def _load_part(part: Mapping[Any, Any], limits: ImageLimits, access: ImageAccess | None, *, depth: int) -> Loaded:
    kind = part.get("type")
    if not (kind is None or isinstance(kind, str)) or kind not in _PART_TYPES or depth > _MAX_DEPTH:
        raise ImageError(
            f"A content part of type {shown(str(kind))} holds no picture that can be taken; hand over {_FORMS}.",
            "unsupported_source",
        )
    keys = [key for key in _PART_KEYS if part.get(key) is not None]
    if keys == ["bytes", "path"]:  # a row of Hugging Face `datasets`: the path is only a name there
        keys = ["bytes"]
    if len(keys) != 1:
        raise ImageError(
            f"A content part must hold its picture under exactly one of the keys {', '.join(_PART_KEYS)}; this one has "
            f"{', '.join(keys) or 'none of them'}.",
            "unsupported_source",
        )
    (key,) = keys
    value = part[key]
    if isinstance(value, Mapping):
        return _load_part(value, limits, access, depth=depth + 1)
    if key in _BASE64_KEYS and isinstance(value, str) and not _is_data_url(value):
        return _decode_base64(value, limits)
    return load_source(Path(value) if key == "path" and isinstance(value, str) else value, limits, access)


def _load_text(text: str, limits: ImageLimits, access: ImageAccess | None) -> bytes:
    if _is_data_url(text):
        return _decode_data_url(text, limits)
    if not text or text.startswith(_BASE64_STARTS):
        what = "Base64 text needs the header of a data URL" if text else "The text is empty"
        raise ImageError(f"{what}; write data:image/png;base64,...", "unsupported_source")
    scheme = text.partition(":")[0].lower()
    if scheme in ("http", "https"):
        return fetch_url(text, access, limits)
    if scheme == "file" or "://" not in text:
        return read_file(text, access, limits)
    raise ImageError(f"Pictures are not fetched from {shown(text)}; hand over {_FORMS}.", "unsupported_source")


def _is_data_url(text: str) -> bool:
    return text[:5].lower() == "data:"


def _decode_data_url(url: str, limits: ImageLimits) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma:
        raise ImageError(
            f"The data URL that starts with {shown(url)} has no comma; write data:image/png;base64,...",
            "unsupported_source",
        )
    if "base64" not in header.lower().split(";")[1:]:
        raise ImageError("The data URL is not base64; write data:image/png;base64,...", "bad_base64")
    return _decode_base64(payload, limits)


def _decode_base64(text: str, limits: ImageLimits) -> bytes:
    limits.check_bytes(len(text) * 3 // 4 - 2)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(
            f"The picture is not in strict base64 ({error}). Encode it with base64.b64encode, without line breaks or "
            "URL-safe letters.",
            "bad_base64",
        ) from error
