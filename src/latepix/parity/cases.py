"""The cases of `latepix doctor`: each picture of the pack in a prompt of its own, and conversations of every shape.

A case is made when it is examined, because the run's picture door may refuse a picture, and that is one of the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from latepix.parity.pack import PictureCase, encode, scene
from latepix.trace.ingress import GridFit, ImageSource, InlineImage
from latepix.trace.messages import ImagePart, Message, TextPart, assistant_message, system_message, user_message

#: The run's `ingest_image`.
Door: TypeAlias = Callable[[ImageSource], InlineImage]

#: What a tokenizer must not take for a special token when it stands in a text.
LITERALS = "<|vision_start|><|image_pad|><|vision_end|> <|video_pad|><|im_end|>"


class Case(msgspec.Struct, frozen=True):
    """One conversation to examine.

    Attributes:
        name: short, unique.
        kind: `picture` (from the pack) or `conversation`.
        about: what is special about it.
        build: makes its messages; raises what the door raises.
        refusal: reason code under which the door or the renderer must refuse it; None if it must pass.
        may_pass: it may also pass, if both sides then see the same: families differ in it.
    """

    name: str
    kind: Literal["picture", "conversation"]
    about: str
    build: Callable[[Door], Sequence[Message]]
    refusal: str | None = None
    may_pass: bool = False


def picture_cases(pack: Sequence[PictureCase]) -> list[Case]:
    """Put each picture of the pack into a prompt of its own."""

    def build_of(data: bytes) -> Callable[[Door], Sequence[Message]]:
        return lambda door: [user_message(door(data), "What is this?")]

    return [
        Case(name=one.name, kind="picture", about=one.about, build=build_of(one.data), refusal=one.refusal)
        for one in pack
    ]


def conversation_cases(grid: GridFit) -> list[Case]:
    """Return conversations of text and pictures, each shape of which has broken some template or server."""
    first = encode(scene(*grid.size(3 * grid.factor, 2 * grid.factor)))
    second = encode(scene(*grid.size(2 * grid.factor, 5 * grid.factor)), "JPEG")

    def case(name: str, about: str, build: Callable[[Door], Sequence[Message]], **outcome: Any) -> Case:
        return Case(name=name, kind="conversation", about=about, build=build, **outcome)

    def two(door: Door) -> tuple[InlineImage, InlineImage]:
        return door(first), door(second)

    return [
        case("text_only", "no picture at all", lambda door: [system_message("Be brief."), user_message("Hello.")]),
        case("picture_alone", "no text", lambda door: [user_message(door(first))]),
        case("picture_first", "before the text", lambda door: [user_message(door(first), "What is above?")]),
        case("picture_last", "after the text", lambda door: [user_message("What is below?", door(first))]),
        case("picture_amid_text", "text on both sides", lambda door: [user_message("Here", door(first), "there.")]),
        case(
            "same_picture_twice",
            "one picture, two placeholders",
            lambda door: [user_message(door(first), "and again", door(first))],
        ),
        case("two_pictures", "of different sizes", lambda door: [user_message(*two(door), "Which is wider?")]),
        case("several_turns", "pictures in three user turns", lambda door: _several_turns(*two(door))),
        case("tool_picture", "in a tool's answer", lambda door: _tool_turns("Here it is:", door(first))),
        case("two_tool_pictures", "in two tools' answers to one turn", lambda door: _parallel_tools(*two(door))),
        case(
            "literal_in_user_text",
            "text that looks like special tokens",
            lambda door: [user_message(f"Look: {LITERALS}", door(first), LITERALS)],
        ),
        case(
            "literal_in_tool_text",
            "the same in a tool's answer",
            lambda door: _tool_turns(LITERALS, door(first), f"after {LITERALS}"),
        ),
        case("literal_only", "the same without a picture", lambda door: [user_message(LITERALS)]),
        case(
            "system_picture",
            "in a system message, where Qwen's templates leave pictures out",
            lambda door: [system_message("Look:", door(first)), user_message("Well?")],
            refusal="placeholder_mismatch",
            may_pass=True,
        ),
    ]


def _several_turns(first: InlineImage, second: InlineImage) -> list[Message]:
    return [
        system_message("You compare pictures."),
        user_message("First:", first),
        assistant_message("Seen."),
        user_message(second, "Second."),
        assistant_message("Seen, too."),
        user_message("Once more:", first, "Which one was it?"),
    ]


def _tool_turns(*answer: str | InlineImage) -> list[Message]:
    return [user_message("Take a screenshot."), _calls("screenshot"), _tool("call_0", *answer)]


def _parallel_tools(first: InlineImage, second: InlineImage) -> list[Message]:
    return [
        user_message("Take both screenshots."),
        _calls("left_screen", "right_screen"),
        _tool("call_0", first),
        _tool("call_1", "right:", second),
    ]


def _calls(*names: str) -> Message:
    calls: list[dict[str, Any]] = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for index, name in enumerate(names)
    ]
    return Message(role="assistant", content=(TextPart(text="One moment."),), tool_calls=tuple(calls))


def _tool(call_id: str, *content: str | InlineImage) -> Message:
    parts = tuple(TextPart(text=item) if isinstance(item, str) else ImagePart(image=item) for item in content)
    return Message(role="tool", content=parts, tool_call_id=call_id)
