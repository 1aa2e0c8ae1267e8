"""How this process would tokenize and process pictures: the facts of a model folder under the libraries installed here.

Read by the trainer and by the local server; vLLM's come from our plugin beside it, in the same form.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from latepix.families.model_info import read_model_info
from latepix.families.registry import get_adapter
from latepix.inference.facts import Facts, TokenizerFacts, vocab_sha256

_PACKAGES = ("torch", "transformers", "tokenizers", "pillow")


def local_facts(path: Path, *, engine: str, dtype: str, with_processor: bool = True, **more: Any) -> Facts:
    """Return the facts of a model folder as this process reads it.

    Args:
        path: the model folder.
        engine: `local` or `trainer`.
        dtype: of the weights, such as `float32`.
        with_processor: load the image processor, which takes torch and transformers.
        more: further fields of `Facts`.
    Raises:
        ConfigError: the folder is not what it should be.
    """
    info = read_model_info(path)
    image_processor = None
    if with_processor:
        processor = get_adapter(info.model_type).load_processor(path)
        image_processor = {**plain(processor.to_dict()), "class": type(processor).__name__}
    return Facts(
        engine=engine,
        versions={"engine": metadata.version("latepix"), **{name: metadata.version(name) for name in _PACKAGES}},
        model=str(path.resolve()),
        model_type=info.model_type,
        dtype=dtype,
        tokenizer=_tokenizer_facts(path),
        image_processor=image_processor,
        **more,
    )


def _tokenizer_facts(path: Path) -> TokenizerFacts:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    added = {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items()}
    everything = tokenizer.get_vocab(with_added_tokens=True)
    vocab = {token: index for token, index in everything.items() if token not in added}
    return TokenizerFacts(
        vocab_sha256=vocab_sha256(vocab),
        vocab_size=len(vocab),
        added_ids=added,
    )


def plain(value: Any) -> Any:
    """Turn settings into JSON values: enums into their values, tuples and foreign mappings into lists and dicts.

    What is None is left out: Hugging Face writes unset settings in some versions and not in others.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, Mapping) or hasattr(value, "keys"):
        return {str(key): plain(value[key]) for key in value.keys() if value[key] is not None}  # noqa: SIM118
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
