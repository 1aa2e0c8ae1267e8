"""Server against trainer, for one prompt: pure functions from what both sides made of it to a list of mismatches.

In: the expanded prompt of both sides with its placeholder ranges and, where the server shows them, its pixels. Out: one
`Mismatch` for each thing that differs, with both values. Nothing here talks to a server.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from latepix.errors import SchemaMismatch
from latepix.inference.contract import PixelsResponse
from latepix.trace.refs import PlaceholderRange

#: Ranges and ids of a large mismatch are told up to here.
_MAX_TOLD = 8


class Mismatch(msgspec.Struct, frozen=True):
    """One thing that is not the same on both sides.

    Attributes:
        kind: `places` (number, start or length of placeholders), `ids`, `grid` (also decoded sizes) or `pixels`.
        what: names it, with the picture's number where there are several.
        server, trainer: both values.
    """

    kind: Literal["places", "ids", "grid", "pixels"]
    what: str
    server: str
    trainer: str


class Placement(msgspec.Struct, frozen=True):
    """An expanded prompt.

    Attributes:
        token_ids: [T].
        ranges: one for each picture slot, in prompt order.
    """

    token_ids: Sequence[int]
    ranges: Sequence[PlaceholderRange]


class Pixels(msgspec.Struct, frozen=True):
    """One picture in front of the vision tower.

    Attributes:
        grid_thw: patches along time, height and width.
        values: [rows, D] float32, normalized.
    """

    grid_thw: tuple[int, int, int]
    values: np.ndarray[Any, Any]


def compare_placements(server: Placement, trainer: Placement) -> list[Mismatch]:
    """Compare the number of placeholders, where each one starts, how long it is, and every token id."""
    found = []
    if len(server.ranges) != len(trainer.ranges):
        found.append(Mismatch("places", "number of placeholders", str(len(server.ranges)), str(len(trainer.ranges))))
    pairs = list(zip(server.ranges, trainer.ranges, strict=False))
    for index, (theirs, ours) in enumerate(pairs):
        where = f" of picture {index}" if len(pairs) > 1 else ""
        if theirs.length != ours.length:
            found.append(Mismatch("places", f"placeholder tokens{where}", str(theirs.length), str(ours.length)))
        if theirs.offset != ours.offset:
            found.append(Mismatch("places", f"placeholder start{where}", str(theirs.offset), str(ours.offset)))
    return found[:_MAX_TOLD] + _compare_ids(server.token_ids, trainer.token_ids)


def compare_pixels(
    server: Sequence[Pixels],
    trainer: Sequence[Pixels],
    sizes: Sequence[tuple[int, int]],
    *,
    patch_size: int,
    tolerance: float,
) -> tuple[list[Mismatch], float | None]:
    """Compare grids, decoded sizes and normalized pixel values.

    Args:
        server, trainer: one for each picture slot, in prompt order.
        sizes: (width, height) in pixels that each picture must have in front of the vision tower.
        patch_size: pixels along a side of a patch.
        tolerance: largest absolute difference of pixel values that passes.
    Returns:
        The mismatches, and the largest difference; None if there was nothing that could be compared.
    """
    if len(server) != len(trainer):
        return [Mismatch("grid", "number of pictures", str(len(server)), str(len(trainer)))], None
    found: list[Mismatch] = []
    differences: list[float] = []
    for index, (theirs, ours, size) in enumerate(zip(server, trainer, sizes, strict=True)):
        where = f" of picture {index}" if len(sizes) > 1 else ""
        if theirs.grid_thw != ours.grid_thw:
            found.append(Mismatch("grid", f"grid{where}", _grid(theirs.grid_thw), _grid(ours.grid_thw)))
        decoded = theirs.grid_thw[2] * patch_size, theirs.grid_thw[1] * patch_size
        if decoded != size:
            found.append(Mismatch("grid", f"decoded size{where}", _size(decoded), _size(size)))
        if theirs.values.shape != ours.values.shape:
            found.append(Mismatch("grid", f"shape of pixels{where}", str(theirs.values.shape), str(ours.values.shape)))
            continue
        difference = float(np.abs(theirs.values - ours.values).max(initial=0.0))
        differences.append(difference)
        # Not `>`: a difference that is NaN must not pass.
        if not difference <= tolerance:
            found.append(_pixel_mismatch(theirs.values, ours.values, where, difference, tolerance))
    return found, float(np.max(differences)) if differences else None


def server_pixels(response: PixelsResponse) -> list[Pixels]:
    """Decode the pictures of an answer.

    Raises:
        SchemaMismatch: a picture's numbers do not fit its shape.
    """
    decoded = []
    for index, image in enumerate(response.images):
        try:
            if image.dtype != "float32":
                raise ValueError(f"dtype is {image.dtype}, wanted float32")
            t, h, w = image.grid_thw
            values = np.frombuffer(base64.b64decode(image.data, validate=True), dtype="<f4").reshape(image.shape)
        except ValueError as error:
            raise SchemaMismatch(
                f"/latepix/pixels, picture {index}: {error}. Install the same version of latepix and latepix-vllm on "
                "both sides."
            ) from error
        decoded.append(Pixels(grid_thw=(t, h, w), values=values))
    return decoded


def server_placement(response: PixelsResponse) -> Placement:
    """Return the prompt that the pixels were made for."""
    placed = sorted((one for ranges in response.mm_placeholders.values() for one in ranges), key=lambda one: one.offset)
    ranges = [PlaceholderRange(offset=one.offset, length=one.length) for one in placed]
    return Placement(token_ids=response.prompt_token_ids, ranges=ranges)


def _compare_ids(server: Sequence[int], trainer: Sequence[int]) -> list[Mismatch]:
    if len(server) != len(trainer):
        return [Mismatch("ids", "length of the prompt", f"{len(server)} tokens", f"{len(trainer)} tokens")]
    wrong = [index for index, (theirs, ours) in enumerate(zip(server, trainer, strict=True)) if theirs != ours]
    if not wrong:
        return []
    at = wrong[0]
    return [Mismatch("ids", f"token ids ({len(wrong)} differ, the first at {at})", str(server[at]), str(trainer[at]))]


def _pixel_mismatch(
    server: np.ndarray[Any, Any], trainer: np.ndarray[Any, Any], where: str, difference: float, tolerance: float
) -> Mismatch:
    gaps = np.abs(server - trainer)
    at = int(gaps.argmax())  # a NaN counts as the largest
    what = f"pixels{where}: largest difference {difference:.2g}, allowed {tolerance:.2g}, at {at} of {gaps.size}"
    if math.isfinite(difference):
        what += f"; mean {float(gaps.mean()):.2g}"
    return Mismatch("pixels", what, f"{float(server.flat[at]):.6g}", f"{float(trainer.flat[at]):.6g}")


def _grid(grid_thw: tuple[int, int, int]) -> str:
    return " x ".join(map(str, grid_thw))


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]} pixels"
