"""The picture sizes that a family's processor leaves alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latepix.trace.ingress import GridFit, ingest_image
from tests.tiny.pictures import draw_picture

GRID = GridFit(factor=32, min_pixels=32 * 32, max_pixels=1024 * 1024)
#: Real settings: Qwen3-VL, Qwen2.5-VL, a tiny model, and a narrow one.
GRIDS = [
    GridFit(factor=32, min_pixels=65_536, max_pixels=16_777_216),
    GridFit(factor=28, min_pixels=3_136, max_pixels=1_003_520),
    GRID,
    GridFit(factor=32, min_pixels=4_096, max_pixels=65_536),
]


def test_a_picture_is_resized_to_the_grid_once() -> None:
    image = ingest_image(draw_picture(width=70, height=45), fit=GRID)
    assert (image.width, image.height) == image.open().size == (64, 32)


def test_without_a_grid_the_size_stays() -> None:
    image = ingest_image(draw_picture(width=70, height=45))
    assert (image.width, image.height) == (70, 45)


@settings(max_examples=300, deadline=None)
@given(
    grid=st.sampled_from(GRIDS),
    short=st.integers(1, 3000),
    ratio=st.floats(1, 200),
    is_tall=st.booleans(),
)
def test_a_fitted_size_is_left_alone_by_the_processor(grid: GridFit, short: int, ratio: float, is_tall: bool) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    long = int(short * ratio)
    width, height = (short, long) if is_tall else (long, short)
    fitted_w, fitted_h = grid.size(width, height)
    resized = smart_resize(
        fitted_h, fitted_w, factor=grid.factor, min_pixels=grid.min_pixels, max_pixels=grid.max_pixels
    )
    assert resized == (fitted_h, fitted_w)
    assert grid.size(fitted_w, fitted_h) == (fitted_w, fitted_h)


@settings(max_examples=300, deadline=None)
@given(grid=st.sampled_from(GRIDS), width=st.integers(1, 4000), height=st.integers(1, 4000))
def test_the_processors_own_size_is_known(grid: GridFit, width: int, height: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    if max(width, height) <= 200 * min(width, height):
        resized = smart_resize(
            height, width, factor=grid.factor, min_pixels=grid.min_pixels, max_pixels=grid.max_pixels
        )
        assert grid.processed_size(width, height) == resized[::-1]


@pytest.mark.parametrize("size", [(32, 32), (320, 64), (1024, 1024)])
def test_a_size_on_the_grid_is_kept(size: tuple[int, int]) -> None:
    assert GRID.size(*size) == size
