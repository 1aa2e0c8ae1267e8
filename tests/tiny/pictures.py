"""Drawn pictures: PIL pictures, encoded files, data URLs and canonical pictures."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from latepix.errors import ImageError
from latepix.trace.ingress import GridFit, InlineImage, ingest_image


def draw_picture(*, width: int = 32, height: int = 32, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Draw a picture of random pixels, different for every seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, size=(height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def draw_flat(*, color: Any, width: int = 32, height: int = 32, mode: str = "RGB") -> Image.Image:
    """Draw a picture of one color."""
    return Image.new(mode, (width, height), color)


def encode(picture: Image.Image, *, file_format: str = "PNG", **options: Any) -> bytes:
    """Encode a picture as a file."""
    buffer = io.BytesIO()
    picture.save(buffer, format=file_format, **options)
    return buffer.getvalue()


def data_url(data: bytes, *, media_type: str = "image/png") -> str:
    """Write the bytes of a file as a data URL."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def make_image(*, width: int = 32, height: int = 32, seed: int = 0, fit: GridFit | None = None) -> InlineImage:
    """Build a canonical picture, different for every seed."""
    return ingest_image(draw_picture(width=width, height=height, seed=seed), fit=fit)


def reason_of(source: object, **options: object) -> str:
    """Return why ingress refuses a picture; it must."""
    with pytest.raises(ImageError) as caught:
        ingest_image(source, **options)  # ty: ignore[invalid-argument-type]
    return caught.value.reason


def pixels(image: InlineImage) -> np.ndarray:
    """Return [height, width, 3] uint8."""
    return np.asarray(image.open())
