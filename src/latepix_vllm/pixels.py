"""What the vision tower is given for a prompt, as JSON; knows nothing of vLLM.

Goes in: the body of `POST /latepix/pixels`, and what vLLM's own pipeline made of it. Comes out: checked token ids and
picture urls, and pixels in base64.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

import torch

_BODY = '{"token_ids": [ids, one placeholder per picture], "content_parts": [{"type": "image_url", "url": "data:..."}]}'


def parse_request(body: Any) -> tuple[list[int], list[str]]:
    """Return the unexpanded token ids and the pictures' data urls of a request.

    Raises:
        ValueError: the body has another form, or a picture is not inline.
    """
    if not isinstance(body, dict) or not body.keys() <= {"token_ids", "content_parts"}:
        raise ValueError(f"The body must be {_BODY}, got {_kind(body)}.")
    token_ids, parts = body.get("token_ids"), body.get("content_parts", [])
    if (
        not isinstance(token_ids, list)
        or not token_ids
        or not all(type(token) is int and token >= 0 for token in token_ids)
    ):
        raise ValueError("token_ids must be a list of one or more integers of 0 or more.")
    if not isinstance(parts, list):
        raise ValueError(f"content_parts must be a list, got {_kind(parts)}.")
    return token_ids, [_data_url(part, index) for index, part in enumerate(parts)]


def check_placeholders(token_ids: list[int], num_images: int, hf_config: Any) -> None:
    """Check that an unexpanded prompt has one placeholder per picture.

    vLLM itself lets a placeholder without a picture pass, and expands an expanded prompt again, both in silence.

    Args:
        token_ids: unexpanded prompt.
        num_images: pictures sent with it.
        hf_config: the model's configuration, which names the id.
    Raises:
        ValueError: the counts differ.
    """
    # Qwen's name of it, and Kimi's.
    ids = [getattr(hf_config, name, None) for name in ("image_token_id", "media_placeholder_token_id")]
    (placeholder,) = [index for index in ids if index is not None] or [None]
    if placeholder is not None and (found := token_ids.count(placeholder)) != num_images:
        raise ValueError(
            f"token_ids holds {found} placeholders (id {placeholder}), and content_parts {num_images} picture(s). "
            "Send the unexpanded prompt, with one placeholder per picture."
        )


def describe_item(item: Mapping[str, Any], norm: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Return grid, shape and pixels of one picture.

    Args:
        item: what the processor made of the picture: `pixel_values` ([rows, ...]) and the grid of its patches.
        norm: the served model's normalization, ([rows, dim], dtype) -> [rows, dim].
    Returns:
        `grid_thw` (t, h, w in patches), `shape` ([rows, dim]), `dtype` and `data`: base64 of little-endian float32, row
        by row. Where the model normalizes, these are its numbers before they are cast to the dtype it computes in;
        where the processor does, vLLM has cast them already.
    Raises:
        RuntimeError: the family's pictures have another form.
    """
    grids = [value for name, value in item.items() if "grid" in name]
    if "pixel_values" not in item or len(grids) != 1:
        raise RuntimeError(f"A picture of this family has no pixel_values or no grid, but {', '.join(sorted(item))}.")
    pixels = norm(item["pixel_values"].flatten(1), torch.float32).contiguous().cpu()
    data = pixels.numpy().astype("<f4", copy=False).tobytes()
    return {
        "grid_thw": [int(side) for side in grids[0].flatten()],
        "shape": list(pixels.shape),
        "dtype": "float32",
        "data": base64.b64encode(data).decode("ascii"),
    }


def _data_url(part: Any, index: int) -> str:
    where = f"content_parts[{index}]"
    if not isinstance(part, dict) or part.get("type") != "image_url":
        raise ValueError(f'{where} must be {{"type": "image_url", "url": "data:..."}}, got {_kind(part)}.')
    url = part.get("url")
    if not isinstance(url, str) or not url.startswith("data:"):
        # vLLM takes a part without a url of its own (such as the nested form of chat requests) for no picture at all.
        raise ValueError(f"{where}.url must be a data url (nothing is fetched), got {_kind(url)}.")
    return url


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with {', '.join(sorted(map(str, value))) or 'nothing in it'}"
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
