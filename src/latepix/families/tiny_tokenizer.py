"""Tokenizers of the tiny models: byte-level BPE, trained on the spot, with the special tokens of each family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

_QWEN_SPECIAL = (
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
_KIMI_SPECIAL = (
    "[BOS]",
    "[EOS]",
    "[UNK]",
    "[PAD]",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|im_end|>",
    "[EOT]",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<|kimi_k25_video_placeholder|>",
)
#: Tokens that a model writes as part of its answer: added, but not special.
_QWEN_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_KIMI_MARKERS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<think>",
    "</think>",
)

_QWEN_TEMPLATE = """\
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


_QWEN25_TEMPLATE = """\
{%- if not messages or messages[0].role != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type in ('image', 'image_url') %}{{ '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part %}{{ part.text }}{% endif -%}
{%- endfor %}{% endif -%}
{{ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

_KIMI_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type in ('image', 'image_url') %}{{ '<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\\n' -}}
{%- elif 'text' in part %}{{ part.text }}{% endif -%}
{%- endfor %}{% endif -%}
{{ '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|><think></think>' }}{% endif -%}
"""


class _Flavour(msgspec.Struct, frozen=True):
    """What differs between the families' tokenizers."""

    special: tuple[str, ...]
    markers: tuple[str, ...]
    template: str
    roles: dict[str, str]


_QWEN_ROLES = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_KIMI_ROLES = {"eos_token": "<|im_end|>", "pad_token": "[PAD]", "bos_token": "[BOS]", "unk_token": "[UNK]"}
#: Qwen3.5 with thinking off: the prompt ends with an empty block of thoughts.
_QWEN35_TEMPLATE = _QWEN_TEMPLATE.replace(
    "{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}"
)
_QWEN3 = _Flavour(_QWEN_SPECIAL, _QWEN_MARKERS, _QWEN_TEMPLATE, _QWEN_ROLES)
_QWEN35 = _Flavour(_QWEN_SPECIAL, _QWEN_MARKERS, _QWEN35_TEMPLATE, _QWEN_ROLES)
_FLAVOURS = {
    "qwen2_5_vl": _Flavour(_QWEN_SPECIAL, _QWEN_MARKERS, _QWEN25_TEMPLATE, _QWEN_ROLES),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN35,
    "kimi_k25": _Flavour(_KIMI_SPECIAL, _KIMI_MARKERS, _KIMI_TEMPLATE, _KIMI_ROLES),
}

_WORDS = (
    "system user assistant which digit is shown in the picture answer with one sum of two digits first second what "
    "number colour red green blue yellow square square shows code word letter read count add and to a it next turn "
    "yes no left right above below zero three four five six seven eight nine ten click at point step reward"
)


def _corpus() -> Iterator[str]:
    rng = np.random.default_rng(0)
    for _ in range(3000):
        words = rng.choice(_WORDS.split(), size=int(rng.integers(3, 12)))
        yield " ".join(words) + str(rng.choice([".", "?", "\n", "!", ":"])) + str(rng.integers(0, 100))


def write_tokenizer(family: str, out: Path, vocab_tokens: int) -> dict[str, int]:
    """Train and save a family's tokenizer and chat template.

    Args:
        family: `model_type`.
        out: model folder.
        vocab_tokens: BPE tokens, added ones not counted.
    Returns:
        The ids of the added tokens.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    flavour = _FLAVOURS[family]
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
    tokenizer.add_special_tokens(list(flavour.special))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in flavour.markers])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
        chat_template=flavour.template,
        **flavour.roles,
    ).save_pretrained(out)
    vocab = tokenizer.get_vocab()
    return {token: vocab[token] for token in (*flavour.special, *flavour.markers)}
