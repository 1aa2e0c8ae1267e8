"""Messages -> logical token ids (one placeholder per picture), through the `renderers` package. Needs no torch.

Two things are ours: sampled history is extended, never tokenized again (`bridge_to_next_turn`), and text that merely
looks like a special token (`<|image_pad|>` in a tool's output) stays text.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from renderers import ToolCallParseStatus, create_renderer
from renderers.configs import KimiK25RendererConfig, Qwen3VLRendererConfig, Qwen35RendererConfig
from tokenizers import Tokenizer

from latepix.errors import ConfigError, PlaceholderMismatch
from latepix.families.model_info import ModelInfo
from latepix.families.registry import Family, family_of
from latepix.inference.qwen25_renderer import Qwen25VLRenderer
from latepix.trace.messages import Message, TextPart, iter_images

#: How a family's conversations become tokens. Thinking is off: the prompt ends with an empty block of thoughts.
_RENDERERS: dict[str, Callable[[Any], Any]] = {
    "qwen2.5-vl": Qwen25VLRenderer,
    "qwen3-vl": lambda tokenizer: create_renderer(tokenizer, Qwen3VLRendererConfig()),
    "qwen3.5": lambda tokenizer: create_renderer(tokenizer, Qwen35RendererConfig(enable_thinking=False)),
    "kimi-k2.5": lambda tokenizer: create_renderer(tokenizer, KimiK25RendererConfig(thinking=False)),
}


class TextTokenizer:
    """The part of a Hugging Face tokenizer that renderers need, on top of `tokenizers` alone."""

    unk_token_id = None

    def __init__(self, path: Path, eos_token_id: int) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:
            # The Rust library raises plain Exception for every kind of unreadable file.
            raise ConfigError(f"Cannot read {path / 'tokenizer.json'} (model.path): {error}") from error
        # Special tokens are only ever emitted by id; the same characters in a message are ordinary text.
        self._tokenizer.encode_special_tokens = True
        self.name_or_path = str(path)
        self.eos_token_id = eos_token_id

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        """Tokenize text without adding anything."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        """Return the text of token ids; special tokens are shown unless `skip_special_tokens`."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=bool(kwargs.get("skip_special_tokens", False)))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a token, or the ids of a list of tokens; None where there is none."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]


class RenderedPrompt(msgspec.Struct, frozen=True):
    """A logical prompt and where its new messages end.

    Attributes:
        token_ids: unexpanded ids, generation prompt included.
        message_ends: per new message, the end of its tokens.
    """

    token_ids: list[int]
    message_ends: list[int]


class MessageRenderer:
    """Turns conversations into token ids and answers into messages, for one model folder."""

    def __init__(self, info: ModelInfo) -> None:
        family = family_of(info.model_type)
        self.info = info
        self.tokenizer = TextTokenizer(info.path, info.stop_ids[0])
        # Any: the package's protocol leaves `process_multimodal` out, which its renderers of pictures take.
        self._renderer: Any = _make_renderer(family, self.tokenizer)

    def render(self, messages: Sequence[Message]) -> RenderedPrompt:
        """Render a whole conversation, ready for the policy to answer.

        Raises:
            PlaceholderMismatch: the template leaves a picture out.
        """
        rendered = self._renderer.render(
            [message.to_openai() for message in messages], add_generation_prompt=True, process_multimodal=False
        )
        self._check_pictures(rendered.token_ids, messages)
        return RenderedPrompt(
            token_ids=list(rendered.token_ids),
            message_ends=_message_ends(rendered.message_indices, 0, len(messages)),
        )

    def extend(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], messages: Sequence[Message]
    ) -> RenderedPrompt | None:
        """Extend a played turn by new messages without touching its tokens; None if the template cannot.

        Raises:
            PlaceholderMismatch: the template leaves a picture out.
        """
        rendered = self._renderer.bridge_to_next_turn(
            list(prompt_ids),
            list(sampled_ids),
            [message.to_openai() for message in messages],
            process_multimodal=False,
        )
        if rendered is None:
            return None
        history = len(prompt_ids) + len(sampled_ids)
        if rendered.token_ids[:history] != [*prompt_ids, *sampled_ids]:
            return None
        self._check_pictures(rendered.token_ids[history:], messages)
        return RenderedPrompt(
            token_ids=list(rendered.token_ids),
            message_ends=_message_ends(rendered.message_indices, history, len(messages)),
        )

    def parse(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> Message:
        """Return the assistant's message that was sampled; tool calls in the OpenAI shape."""
        parsed = self._renderer.parse_response(list(sampled_ids), prompt_ids=list(prompt_ids))
        calls = tuple(
            {"id": call.id or f"call_{index}", "type": "function", "function": _function(call)}
            for index, call in enumerate(call for call in parsed.tool_calls if call.status == ToolCallParseStatus.OK)
        )
        text = parsed.content or ""
        return Message(role="assistant", content=(TextPart(text=text),) if text else (), tool_calls=calls)

    def answer_ids(self, text: str) -> list[int]:
        """Return the tokens of an answer as a policy would have sampled it: the text and the end of the turn."""
        return [*self.tokenizer.encode(text), self.info.stop_ids[0]]

    def _check_pictures(self, token_ids: Sequence[int], messages: Sequence[Message]) -> None:
        num_placeholders = sum(token == self.info.image_placeholder_id for token in token_ids)
        num_images = sum(1 for _ in iter_images(messages))
        if num_placeholders != num_images:
            raise PlaceholderMismatch(
                f"The messages hold {num_images} pictures, their prompt {num_placeholders} placeholders. The template "
                f"of {self.info.model_type} shows no pictures in some roles (system); move them to a user message."
            )


def _make_renderer(family: Family, tokenizer: TextTokenizer) -> Any:
    """Return the renderer of a family: one of ours by name, or one of another package by import path.

    Raises:
        ConfigError: it cannot be imported, or the tokenizer lacks a token that it needs.
    """
    make = _RENDERERS.get(family.renderer)
    try:
        if make is None:
            module, _, name = family.renderer.partition(":")
            make = getattr(importlib.import_module(module), name)
        return make(tokenizer)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"The renderer of {family.model_type}, {family.renderer!r}, is not there: {error}") from error
    except AssertionError as error:
        # How the `renderers` package says that a special token is missing.
        raise ConfigError(f"{tokenizer.name_or_path} (model.path): {error}") from error


def _function(call: Any) -> dict[str, Any]:
    arguments = call.arguments
    return {
        "name": call.name,
        "arguments": arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode(),
    }


def _message_ends(message_indices: Sequence[int], start: int, num_messages: int) -> list[int]:
    """Return where each message's tokens end; scaffolding before a message belongs to it.

    `message_indices` names the message of every token, -1 for scaffolding (and for everything before `start`).
    """
    ends = [start] * num_messages
    for position in range(start, len(message_indices)):
        if message_indices[position] >= 0:
            ends[message_indices[position]] = position + 1
    for index in range(1, num_messages):
        ends[index] = max(ends[index], ends[index - 1])
    return ends
