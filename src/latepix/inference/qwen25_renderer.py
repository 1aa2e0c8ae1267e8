"""Messages -> tokens for Qwen2.5-VL, which the `renderers` package does not know; same methods, same results.

The template of the hub's checkpoints: every message is `<|im_start|>role`, a line end, its texts and pictures,
`<|im_end|>` and a line end; a conversation without a system message gets "You are a helpful assistant."; tools are not
mentioned. Pictures are shown in every role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from renderers import ParsedResponse, RenderedTokens, Tokenizer, reject_assistant_in_extension, trim_to_turn_close

_SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
_IMAGE_TYPES = frozenset({"image", "image_url"})


class Qwen25VLRenderer:
    """Deterministic renderer for Qwen2.5-VL.

    Args:
        tokenizer: knows the special tokens by name.
    Raises:
        ValueError: a special token is missing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start, self._end, self._vision_start, self._pad, self._vision_end = (
            self._token_id(token)
            for token in ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
        )
        self._stops = {self._end, self._token_id("<|endoftext|>")}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        process_multimodal: bool = False,
    ) -> RenderedTokens:
        """Render a conversation; `message_indices` is -1 for what belongs to no message of it.

        Raises:
            NotImplementedError: pictures are to be processed, which is done elsewhere.
        """
        _refuse_processing(process_multimodal)
        stream = _Stream(self._tokenizer)
        if not messages or messages[0]["role"] != "system":
            self._message(stream, _SYSTEM, -1)
        for index, message in enumerate(messages):
            self._message(stream, message, index)
        if add_generation_prompt:
            self._generation_prompt(stream)
        return RenderedTokens(token_ids=stream.token_ids, message_indices=stream.message_indices)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        process_multimodal: bool = False,
    ) -> RenderedTokens | None:
        """Extend a played turn by new messages without touching its tokens; None if that cannot be."""
        _refuse_processing(process_multimodal)
        if not previous_prompt_ids or not new_messages or reject_assistant_in_extension(new_messages):
            return None
        previous = trim_to_turn_close(
            previous_prompt_ids, previous_completion_ids, self._stops, synthesize_close=self._end
        )
        if previous is None:
            return None
        stream = _Stream(self._tokenizer)
        stream.ids(previous, -1)
        # The line end behind the answer, which the policy does not sample.
        stream.text("\n", -1)
        for index, message in enumerate(new_messages):
            self._message(stream, message, index)
        self._generation_prompt(stream)
        return RenderedTokens(token_ids=stream.token_ids, message_indices=stream.message_indices)

    def parse_response(self, token_ids: list[int], *, prompt_ids: list[int] | None = None) -> ParsedResponse:
        """Return the text of an answer up to its end of turn."""
        del prompt_ids
        end = next((at for at, token in enumerate(token_ids) if token in self._stops), len(token_ids))
        return ParsedResponse(content=self._tokenizer.decode(token_ids[:end], skip_special_tokens=False).strip())

    def _message(self, stream: _Stream, message: Mapping[str, Any], index: int) -> None:
        stream.ids([self._start], index)
        stream.text(message["role"] + "\n", index)
        content = message.get("content") or ""
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part.get("type") in _IMAGE_TYPES:
                stream.ids([self._vision_start, self._pad, self._vision_end], index)
            else:
                stream.text(part["text"], index)
        stream.ids([self._end], index)
        stream.text("\n", index)

    def _generation_prompt(self, stream: _Stream) -> None:
        stream.ids([self._start], -1)
        stream.text("assistant\n", -1)

    def _token_id(self, token: str) -> int:
        index = self._tokenizer.convert_tokens_to_ids(token)
        if not isinstance(index, int):
            raise ValueError(f"the tokenizer lacks {token!r}")
        return index


class _Stream:
    """Tokens with their message; texts that follow each other are tokenized as one, as the template's output is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[tuple[str, int]] = []
        self._token_ids: list[int] = []
        self._message_indices: list[int] = []

    @property
    def token_ids(self) -> list[int]:
        self._flush()
        return self._token_ids

    @property
    def message_indices(self) -> list[int]:
        self._flush()
        return self._message_indices

    def ids(self, token_ids: Sequence[int], index: int) -> None:
        self._flush()
        self._token_ids += token_ids
        self._message_indices += [index] * len(token_ids)

    def text(self, text: str, index: int) -> None:
        self._pending.append((text, index))

    def _flush(self) -> None:
        if not self._pending:
            return
        # Only the texts of one message, or the line end before a special token, ever stand together.
        encoded = self._tokenizer.encode("".join(text for text, _ in self._pending), add_special_tokens=False)
        self._token_ids += encoded
        self._message_indices += [self._pending[-1][1]] * len(encoded)
        self._pending = []


def _refuse_processing(process_multimodal: bool) -> None:
    if process_multimodal:
        raise NotImplementedError("pictures are processed late, by the server and by the trainer")
