from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from latepix.errors import PlaceholderMismatch
from latepix.families.base import ProcessedImage
from latepix.families.qwen_vl import QwenVLAdapter
from latepix.trace.ingress import InlineImage
from latepix.trace.refs import MMRefs
from latepix.trace.training import MicroBatch, TrainingSample, pack_samples
from latepix.trainer.materialize import Materializer, MaterializeStats, MMInputs, materialize_mm_refs
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
    with pytest.raises(
        PlaceholderMismatch, match=r"Slot 1 at 7, picture \w{12}: grid \(1, 6, 4\) needs 6 tokens, the sample has 5"
    ):
        materialize_mm_refs(refs, adapter, processor)


def micro_batch(*images: InlineImage, length: int = 1, trace_id: str = "t") -> MicroBatch:
    refs = refs_of(*images, length=length)
    ids = np.zeros(10 * len(images) + 1, dtype=np.int32)
    sample = TrainingSample(
        token_ids=ids,
        loss_mask=ids > 0,
        inference_logprobs=ids.astype(np.float32),
        advantages=ids.astype(np.float32),
        mm_refs=refs,
        trace_id=trace_id,
    )
    return pack_samples([sample])


def test_pictures_are_remembered_between_micro_batches(materializer: Materializer, adapter: CountingAdapter) -> None:
    first = materializer.materialize(micro_batch(picture(1), picture(2)))
    second = materializer.materialize(micro_batch(picture(2), picture(1)))
    stats = materializer.take_stats()
    assert adapter.num_processed == stats.num_processed == 2
    assert stats.num_hits == 2
    assert stats.decode_s > 0
    assert stats.processor_s > 0
    assert torch.equal(first.images[0].pixel_values, second.images[1].pixel_values)
    assert materializer.take_stats() == MaterializeStats()


def test_the_picture_used_longest_ago_leaves_a_full_cache(materializer: Materializer, adapter: CountingAdapter) -> None:
    for seeds, num_processed in (((1, 2), 2), ((1,), 2), ((3,), 3), ((1, 3), 3), ((2,), 4)):
        materializer.materialize(micro_batch(*map(picture, seeds)))
        assert adapter.num_processed == num_processed, seeds
        assert materializer.cached_bytes <= 2 * PICTURE_BYTES


def test_pictures_that_a_step_needs_again_stay(materializer: Materializer, adapter: CountingAdapter) -> None:
    # Room for two. By age, 1 would leave when 3 comes; but it is needed again, and 2 and 3 are not.
    seeds = ((1, 2), (3,), (4,), (1,))
    found = list(materializer.run([micro_batch(*map(picture, one)) for one in seeds]))
    assert [len(inputs.images) for inputs in found] == [2, 1, 1, 1]
    assert adapter.num_processed == 4


def test_a_picture_in_every_micro_batch_is_processed_once(adapter: CountingAdapter, processor: Any) -> None:
    materializer = Materializer(adapter, processor, cache_bytes=100 * PICTURE_BYTES, num_workers=4)
    try:
        list(materializer.run([micro_batch(picture(1), picture(2 + number % 3)) for number in range(12)]))
        assert adapter.num_processed == 4
        assert materializer.take_stats().num_hits == 24 - 4
    finally:
        materializer.close()


def test_the_next_micro_batch_is_made_while_the_last_one_is_used(processor: Any) -> None:
    started = threading.Event()

    class Telling(CountingAdapter):
        def process_image(self, processor: Any, picture: Image.Image) -> ProcessedImage:
            if self.num_processed == 1:
                started.set()
            return super().process_image(processor, picture)

    materializer = Materializer(Telling(), processor, cache_bytes=0, num_workers=1)
    try:
        pictures = materializer.run([micro_batch(picture(1)), micro_batch(picture(2))])
        next(pictures)
        assert started.wait(10), "the second picture is not begun before it is asked for"
    finally:
        materializer.close()


@pytest.mark.parametrize("cache_bytes", [0, PICTURE_BYTES - 1])
def test_a_cache_too_small_for_a_picture_only_costs_time(
    adapter: CountingAdapter, processor: Any, cache_bytes: int
) -> None:
    materializer = Materializer(adapter, processor, cache_bytes=cache_bytes)
    try:
        for _ in range(2):
            inputs = materializer.materialize(micro_batch(picture(1), picture(2), picture(1)))
            assert [image.num_tokens for image in inputs.images] == [1, 1]
        assert adapter.num_processed == 4
        assert materializer.cached_bytes == 0
    finally:
        materializer.close()


def test_a_mismatch_in_the_background_names_trace_picture_and_both_numbers(materializer: Materializer) -> None:
    wrong = micro_batch(picture(1), length=2, trace_id="s3-g1-r0")
    sha = picture(1).sha256[:12]
    with pytest.raises(
        PlaceholderMismatch, match=rf"Trace s3-g1-r0: .* picture {sha}: .* needs 1 tokens, the sample has 2"
    ):
        materializer.materialize(wrong)
    assert materializer.materialize(micro_batch(picture(1))).slot_images == (0,)


def test_a_picture_that_failed_is_tried_again(processor: Any) -> None:
    class Failing(CountingAdapter):
        def process_image(self, processor: Any, picture: Image.Image) -> ProcessedImage:
            if self.num_processed == 0:
                self.num_processed += 1
                raise RuntimeError("no memory")
            return super().process_image(processor, picture)

    materializer = Materializer(Failing(), processor, cache_bytes=PICTURE_BYTES)
    try:
        with pytest.raises(RuntimeError, match="no memory"):
            materializer.materialize(micro_batch(picture(1)))
        assert len(materializer.materialize(micro_batch(picture(1))).images) == 1
    finally:
        materializer.close()
