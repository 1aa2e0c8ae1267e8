"""Conversation messages with pictures in place, in the shape of the OpenAI chat format.

A message is made by an environment or parsed from what the policy sampled; it is read by the renderer, the inference
client and the report. `iter_images` is the one walker over pictures: every pass uses it, so that their order can
never differ between passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

import msgspec

from latepix.trace.ingress import InlineImage

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A run of text."""

    text: str


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    """One canonical picture."""

    image: InlineImage


Part: TypeAlias = TextPart | ImagePart


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of one speaker.

    Attributes:
        role: who speaks.
        content: text and pictures in reading order.
        tool_calls: for the assistant: calls in the OpenAI shape.
        tool_call_id: for a tool: the call it answers.
    """

    role: Role
    content: tuple[Part, ...] = ()
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """All text parts joined."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    def to_openai(self) -> dict[str, Any]:
        """Return the message as an OpenAI chat message; every picture is an `image_url` part with a data URL."""
        parts: list[dict[str, Any]] = [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else image_content_part(part.image)
            for part in self.content
        ]
        message: dict[str, Any] = {"role": self.role, "content": parts}
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def user_message(*content: str | InlineImage) -> Message:
    """Build a user message from texts and pictures in reading order."""
    return Message(role="user", content=_parts(content))


def system_message(*content: str | InlineImage) -> Message:
    """Build a system message from texts and pictures in reading order."""
    return Message(role="system", content=_parts(content))


def assistant_message(text: str) -> Message:
    """Build an assistant message that holds one text."""
    return Message(role="assistant", content=(TextPart(text=text),))


def _parts(content: Iterable[str | InlineImage]) -> tuple[Part, ...]:
    return tuple(TextPart(text=item) if isinstance(item, str) else ImagePart(image=item) for item in content)


def iter_images(messages: Iterable[Message]) -> Iterator[InlineImage]:
    """Yield the pictures of a conversation in the order in which the model meets them."""
    for message in messages:
        for part in message.content:
            if isinstance(part, ImagePart):
                yield part.image


def image_content_part(image: InlineImage) -> dict[str, Any]:
    """Return the `content_parts` entry of one picture."""
    return {"type": "image_url", "image_url": {"url": image.url}}
