from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

from latepix.families.facts import local_facts, plain
from latepix.families.model_info import ModelInfo
from latepix.inference.facts import Facts, vocab_sha256


class Side(enum.Enum):
    LEFT = (1, 2)


class Foreign:
    """A mapping that is none by name, as Hugging Face's `SizeDict` is."""

    def keys(self) -> Iterator[str]:
        return iter(("height", "width"))

    def __getitem__(self, key: str) -> int | None:
        return {"height": 3, "width": None}[key]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3),
        (True, True),
        (0.5, 0.5),
        ("text", "text"),
        (None, None),
        ((1, (2, 3)), [1, [2, 3]]),
        (Side.LEFT, [1, 2]),
        (Image.Resampling.BICUBIC, 3),
        (torch.float32, "torch.float32"),
        ({"a": None, 2: (1,), "size": {"longest_edge": None}}, {"2": [1], "size": {}}),
        (Foreign(), {"height": 3}),
        (np.float64(0.25), 0.25),
    ],
)
def test_settings_become_json_values(value: Any, expected: Any) -> None:
    got = plain(value)
    assert got == expected
    assert json.loads(json.dumps(got)) == expected


@pytest.fixture(scope="module")
def facts(tiny_model: Path) -> Facts:
    return local_facts(tiny_model, engine="trainer", dtype="float32", weight_version="step-0")


def test_facts_of_a_model_folder(tiny_model: Path, facts: Facts) -> None:
    assert (facts.engine, facts.model, facts.model_type, facts.dtype, facts.weight_version) == (
        "trainer",
        str(tiny_model.resolve()),
        "qwen3_vl",
        "float32",
        "step-0",
    )
    assert facts.versions["engine"] == metadata.version("latepix")
    assert facts.versions["pillow"] == metadata.version("pillow")


def test_facts_hold_the_tokenizer_with_its_special_tokens(tiny_model: Path, facts: Facts, info: ModelInfo) -> None:
    vocab = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).get_vocab(with_added_tokens=False)
    assert facts.tokenizer is not None
    assert facts.tokenizer.vocab_sha256 == vocab_sha256(vocab)
    assert facts.tokenizer.vocab_size == len(vocab)
    specials = facts.tokenizer.added_ids
    assert specials["<|image_pad|>"] == info.image_placeholder_id
    assert specials["<|im_end|>"] == info.stop_ids[0]
    # Added, but text.
    assert "<think>" in specials


def test_facts_hold_the_image_processor(tiny_model: Path, facts: Facts, info: ModelInfo) -> None:
    processor = facts.image_processor
    assert processor is not None
    assert processor["class"] == "Qwen2VLImageProcessorPil"
    assert processor["patch_size"] * processor["merge_size"] == info.grid.factor
    assert processor["size"] == {"shortest_edge": info.grid.min_pixels, "longest_edge": info.grid.max_pixels}
    assert processor["resample"] == 3


def test_facts_travel_as_json(facts: Facts) -> None:
    assert msgspec.json.decode(msgspec.json.encode(facts), type=Facts) == facts
