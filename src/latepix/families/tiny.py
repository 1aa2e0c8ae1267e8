"""Tiny random checkpoints of the real Hugging Face classes: the laptop's stand-in for a hub download.

`make_tiny(family, out)` writes a complete model folder: config and random weights of the real class, a byte-level BPE
tokenizer trained on the spot with every special token the family's renderer asks for, a chat template, and the
image processor's settings. Same seed, same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from latepix.errors import ConfigError
from latepix.transport.files import write_bytes, write_folder

_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
#: Tokens that a model writes as part of its answer: added, but not special.
_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

_CHAT_TEMPLATE = """\
{%- macro show(content, media=true) -%}
{%- if content is string %}{{ content }}{% else %}{% for part in content -%}
{%- if not media and 'text' not in part %}{# the real template shows no pictures here -#}
{%- elif part.type in ('image', 'image_url') %}{{ '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part %}{{ part.text }}{% endif -%}
{%- endfor %}{% endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\\n<tool_response>\\n' + show(message.content) + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + show(message.content, message.role != 'system') + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

_WORDS = (
    "system user assistant which digit is shown in the picture answer with one sum of two digits first second what "
    "number colour red green blue yellow square square shows code word letter read count add and to a it next turn "
    "yes no left right above below zero three four five six seven eight nine ten click at point step reward"
)


class TinySize(msgspec.Struct, frozen=True):
    """Shape of a tiny model; the defaults learn handwritten digits in a CPU minute.

    Attributes:
        hidden, layers, heads, kv_heads, head_dim, intermediate: of the text model.
        vision_hidden, vision_depth, vision_heads, vision_intermediate: of the vision tower.
        vocab_tokens: BPE tokens, specials not counted.
        max_pixels: largest picture, width x height.
        max_positions: longest sequence, tokens.
    """

    hidden: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 192
    vision_hidden: int = 64
    vision_depth: int = 2
    vision_heads: int = 4
    vision_intermediate: int = 128
    vocab_tokens: int = 360
    max_pixels: int = 1024 * 1024
    max_positions: int = 8192


_PATCH, _MERGE = 16, 2


def make_tiny(family: str, out: Path, *, seed: int = 0, size: TinySize | None = None) -> Path:
    """Write a tiny random model folder.

    Args:
        family: `model_type` of the family.
        out: folder to write; must not exist or be empty.
        seed: of the random weights.
        size: shape of the model; None takes the defaults.
    Returns:
        `out`.
    Raises:
        ConfigError: the family is unknown, or `out` already holds something.
        TransportError: the disk refused; nothing is left behind.
    """
    if family not in _BUILDERS:
        raise ConfigError(f"--family: no tiny model for family {family!r}. Known: {', '.join(sorted(_BUILDERS))}.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists and is not an empty folder; choose another one or remove it.")
    return write_folder(out, lambda folder: _BUILDERS[family](folder, seed, size or TinySize()))


def _corpus() -> Iterator[str]:
    rng = np.random.default_rng(0)
    for _ in range(3000):
        words = rng.choice(_WORDS.split(), size=int(rng.integers(3, 12)))
        yield " ".join(words) + str(rng.choice([".", "?", "\n", "!", ":"])) + str(rng.integers(0, 100))


def _write_tokenizer(out: Path, vocab_tokens: int) -> dict[str, int]:
    """Train and save the tokenizer; returns the ids of the added tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_tokens, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _MARKERS])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(out)
    vocab = tokenizer.get_vocab()
    return {token: vocab[token] for token in (*_SPECIAL, *_MARKERS)}


def _write_qwen_processor(out: Path, size: TinySize) -> None:
    """Write the settings that `AutoImageProcessor`, `AutoProcessor` (with torchvision) and vLLM read."""
    shared = {
        "patch_size": _PATCH,
        "merge_size": _MERGE,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": (_PATCH * _MERGE) ** 2, "longest_edge": size.max_pixels},
        "processor_class": "Qwen3VLProcessor",
    }
    files = {
        "preprocessor_config.json": {**shared, "image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {**shared, "video_processor_type": "Qwen3VLVideoProcessor"},
    }
    for name, settings in files.items():
        write_bytes(out / name, (json.dumps(settings, indent=2) + "\n").encode())


def _make_qwen3_vl(out: Path, seed: int, size: TinySize) -> None:
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    ids = _write_tokenizer(out, size.vocab_tokens)
    _write_qwen_processor(out, size)
    third = size.head_dim // 6
    text = {
        "vocab_size": -(-(max(ids.values()) + 1) // 16) * 16,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": size.max_positions,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_interleaved": True,
            "mrope_section": [size.head_dim // 2 - 2 * third, third, third],
        },
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": size.vision_depth,
        "hidden_size": size.vision_hidden,
        "intermediate_size": size.vision_intermediate,
        "num_heads": size.vision_heads,
        "patch_size": _PATCH,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": size.hidden,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    model.save_pretrained(out)


_BUILDERS: dict[str, Callable[[Path, int, TinySize], None]] = {"qwen3_vl": _make_qwen3_vl}
