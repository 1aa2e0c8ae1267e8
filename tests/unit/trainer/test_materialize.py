from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from latepix.errors import PlaceholderMismatch
from latepix.families.base import ProcessedImage
from latepix.families.qwen_vl import QwenVLAdapter
from latepix.trace.ingress import InlineImage
from latepix.trace.refs import MMRefs
from latepix.trainer.materialize import Materializer, MMInputs, materialize_mm_refs
from tests.tiny.pictures import make_image

#: Bytes of a processed 32 x 32 picture: 4 patches of 3 x 2 x 16 x 16 float32.
PICTURE_BYTES = 4 * 1536 * 4


class CountingAdapter(QwenVLAdapter):
    """The adapter with a tally of the pictures it processed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_processed = 0

    def process_image(self, processor: Any, picture: Image.Image) -> ProcessedImage:
        self.num_processed += 1
        return super().process_image(processor, picture)


@pytest.fixture
def adapter() -> CountingAdapter:
    return CountingAdapter()


@pytest.fixture(scope="module")
def processor(tiny_model: Path) -> Any:
    return QwenVLAdapter().load_processor(tiny_model)


@pytest.fixture
def materializer(adapter: CountingAdapter, processor: Any) -> Iterator[Materializer]:
    materializer = Materializer(adapter, processor, cache_bytes=2 * PICTURE_BYTES)
    yield materializer
    materializer.close()


def picture(seed: int) -> InlineImage:
    return make_image(seed=seed)


def refs_of(*images: InlineImage, length: int = 1) -> MMRefs:
    return MMRefs.from_slots([(image, 10 * slot, length) for slot, image in enumerate(images)])


def test_each_distinct_picture_is_processed_once_for_all_its_slots(adapter: CountingAdapter, processor: Any) -> None:
    inputs = materialize_mm_refs(refs_of(picture(1), picture(2), picture(1), picture(1)), adapter, processor)
    assert adapter.num_processed == len(inputs.images) == 2
    assert inputs.slot_images == (0, 1, 0, 0)
    assert inputs.images[0].grid_thw == (1, 2, 2)


def test_no_pictures_give_empty_inputs(adapter: CountingAdapter, processor: Any) -> None:
    assert materialize_mm_refs(MMRefs(), adapter, processor) == MMInputs()


def test_a_slot_of_the_wrong_length_is_named_with_both_numbers(adapter: CountingAdapter, processor: Any) -> None:
    refs = MMRefs.from_slots([(picture(1), 3, 1), (make_image(width=64, height=96, seed=2), 7, 5)])
    with pytest.raises(PlaceholderMismatch, match=r"Slot 1 at 7: grid \(1, 6, 4\) needs 6 tokens, the sample has 5"):
        materialize_mm_refs(refs, adapter, processor)


def test_pictures_are_remembered_between_micro_batches(materializer: Materializer, adapter: CountingAdapter) -> None:
    first = materializer.submit(refs_of(picture(1), picture(2))).result()
    second = materializer.submit(refs_of(picture(2), picture(1))).result()
    assert adapter.num_processed == materializer.num_processed == 2
    assert materializer.num_hits == 2
    assert torch.equal(first.images[0].pixel_values, second.images[1].pixel_values)


def test_the_picture_used_longest_ago_leaves_a_full_cache(materializer: Materializer, adapter: CountingAdapter) -> None:
    for seeds, num_processed in (((1, 2), 2), ((1,), 2), ((3,), 3), ((1, 3), 3), ((2,), 4)):
        materializer.submit(refs_of(*map(picture, seeds))).result()
        assert adapter.num_processed == num_processed, seeds


@pytest.mark.parametrize("cache_bytes", [0, PICTURE_BYTES - 1])
def test_a_cache_too_small_for_a_picture_only_costs_time(
    adapter: CountingAdapter, processor: Any, cache_bytes: int
) -> None:
    materializer = Materializer(adapter, processor, cache_bytes=cache_bytes)
    try:
        for _ in range(2):
            inputs = materializer.submit(refs_of(picture(1), picture(2), picture(1))).result()
            assert [image.num_tokens for image in inputs.images] == [1, 1]
        assert adapter.num_processed == 4
    finally:
        materializer.close()


def test_a_mismatch_in_the_background_reaches_whoever_waits(materializer: Materializer) -> None:
    waiting = materializer.submit(refs_of(picture(1), length=2))
    with pytest.raises(PlaceholderMismatch, match="needs 1 tokens, the sample has 2"):
        waiting.result()
    assert materializer.submit(refs_of(picture(1))).result().slot_images == (0,)
