"""What a client compares with its trainer before the first step, as plain JSON; knows nothing of vLLM.

Goes in: a tokenizer or an image processor of Hugging Face. Comes out: hashes and dictionaries that are equal exactly if
both sides turn text and pictures into the same numbers.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Mapping, Sequence, Set
from typing import Any


def tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    """Return `vocab_sha256` and `vocab_size` of a Hugging Face tokenizer without its added tokens, and `added_ids`."""
    added = {token.content: index for index, token in sorted(tokenizer.added_tokens_decoder.items())}
    vocab = {token: index for token, index in tokenizer.get_vocab().items() if token not in added}
    return {"vocab_sha256": vocab_sha256(vocab), "vocab_size": len(vocab), "added_ids": added}


def vocab_sha256(vocab: Mapping[str, int]) -> str:
    """Return the sha256 of `"{id}\\t{token}\\n"` over a vocabulary, ordered by id, then token."""
    digest = hashlib.sha256()
    for index, token in sorted((index, token) for token, index in vocab.items()):
        # Byte-level vocabularies may hold halves of surrogate pairs, which plain utf-8 refuses.
        digest.update(f"{index}\t{token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def image_processor_facts(processor: Any) -> dict[str, Any]:
    """Return the settings of a Hugging Face image processor, and its `class`.

    Arrays are left out: those are tables that the processor computed from its settings (Kimi's has 256 rows).
    """
    settings = {name: value for name, value in processor.to_dict().items() if getattr(value, "ndim", 0) == 0}
    return {**plain(settings), "class": type(processor).__name__}


def plain(value: Any) -> Any:
    """Return a value as JSON has it: enums by value, mappings and dataclasses as objects, sequences as arrays.

    Whatever JSON has no form for (a torch dtype, a callable) becomes its text.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(inner) for key, inner in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Set):
        return sorted((plain(inner) for inner in value), key=str)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain(inner) for inner in value]
    if callable(getattr(value, "tolist", None)):
        # Scalars of numpy and torch, and arrays.
        return plain(value.tolist())
    return str(value)
