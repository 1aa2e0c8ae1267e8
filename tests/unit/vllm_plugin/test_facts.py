"""Settings as plain JSON, and the hash of a vocabulary."""

from __future__ import annotations

import enum
import hashlib
import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from latepix_vllm.facts import image_processor_facts, plain, tokenizer_facts, vocab_sha256


class Resampling(enum.IntEnum):
    BICUBIC = 3


@dataclass
class Size:
    longest_edge: int
    shortest_edge: int | None = None


class FakeProcessor:
    def to_dict(self) -> dict[str, Any]:
        return {
            "size": Size(64),
            "resample": Resampling.BICUBIC,
            "image_mean": (0.5, 0.25),
            "dtype": torch.float32,
            "table": np.zeros((256, 3)),
        }


def token(content: str, *, special: bool) -> SimpleNamespace:
    return SimpleNamespace(content=content, special=special)


def test_a_vocabulary_hashes_its_lines_by_id() -> None:
    expected = hashlib.sha256(b"0\ta\n1\tb\n1\tc\n").hexdigest()
    assert vocab_sha256({"c": 1, "b": 1, "a": 0}) == expected


def test_half_a_surrogate_pair_can_be_hashed() -> None:
    assert vocab_sha256({"\ud83d": 0}) == hashlib.sha256(b"0\t\xed\xa0\xbd\n").hexdigest()


def test_added_tokens_are_listed_and_no_part_of_the_vocabulary() -> None:
    tokenizer = SimpleNamespace(
        get_vocab=lambda: {"a": 0, "<|im_end|>": 1, "<tool>": 2},
        added_tokens_decoder={2: token("<tool>", special=False), 1: token("<|im_end|>", special=True)},
    )
    facts = tokenizer_facts(tokenizer)
    assert facts["added_ids"] == {"<|im_end|>": 1, "<tool>": 2}
    assert (facts["vocab_size"], facts["vocab_sha256"]) == (1, vocab_sha256({"a": 0}))


def test_a_processor_becomes_json() -> None:
    facts = image_processor_facts(FakeProcessor())
    assert json.loads(json.dumps(facts)) == facts
    assert facts == {
        "size": {"longest_edge": 64, "shortest_edge": None},
        "resample": 3,
        "image_mean": [0.5, 0.25],
        "dtype": "torch.float32",
        "class": "FakeProcessor",
    }


def test_arrays_and_sets_become_lists() -> None:
    assert plain({"a": np.float32(0.5), "b": torch.tensor([1, 2]), "c": {"y", "x"}}) == {
        "a": 0.5,
        "b": [1, 2],
        "c": ["x", "y"],
    }
