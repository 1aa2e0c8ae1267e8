"""Our token counts and pixels = those of Hugging Face's image processor. The arithmetic is the same: no tolerance."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from latepix.trace.ingress import ingest_image
from tests.tiny.policy import Policy, draw

SIZES = [(32, 32), (64, 32), (96, 160), (224, 64), (1024, 1024)]
ODD_SIZES = [(1, 1), (20, 33), (50, 47), (100, 20), (640, 480), (1500, 1400), (3000, 40)]


@pytest.mark.parametrize("size", SIZES + ODD_SIZES)
def test_number_of_tokens_equals_the_processors(policy: Policy, size: tuple[int, int]) -> None:
    image = ingest_image(Image.new("RGB", size, (9, 99, 199)), fit=policy.info.grid)
    processed = policy.adapter.process_image(policy.processor, image.open())
    num_patches = policy.processor.get_number_of_image_patches(image.height, image.width)
    assert processed.num_tokens == policy.info.num_image_tokens(image) == num_patches // 4
    assert len(processed.pixel_values) == num_patches


@pytest.mark.parametrize("size", SIZES)
def test_a_picture_on_the_grid_is_not_resized_again(policy: Policy, size: tuple[int, int]) -> None:
    processed = policy.adapter.process_image(policy.processor, draw(*size, seed=1).open())
    assert processed.grid_thw == (1, size[1] // 16, size[0] // 16)


@pytest.mark.parametrize("size", [*SIZES, (50, 47), (640, 480)])
def test_pixels_equal_the_image_processors(policy: Policy, size: tuple[int, int]) -> None:
    image = draw(*size, seed=2)
    wanted = AutoImageProcessor.from_pretrained(policy.path, backend="pil")(images=[image.open()], return_tensors="pt")
    ours = policy.adapter.process_image(policy.processor, image.open())
    assert torch.equal(ours.pixel_values, wanted["pixel_values"])
    assert list(ours.grid_thw) == wanted["image_grid_thw"][0].tolist()
    assert ours.pixel_values.std() > 0.3


def test_a_picture_has_the_same_pixels_alone_and_among_others(policy: Policy) -> None:
    images = [draw(32, 64, seed=3), draw(96, 32, seed=4), draw(32, 32, seed=5)]
    together = AutoImageProcessor.from_pretrained(policy.path, backend="pil")(
        images=[image.open() for image in images], return_tensors="pt"
    )
    alone = [policy.adapter.process_image(policy.processor, image.open()) for image in images]
    assert torch.equal(torch.cat([image.pixel_values for image in alone]), together["pixel_values"])
    assert [list(image.grid_thw) for image in alone] == together["image_grid_thw"].tolist()
