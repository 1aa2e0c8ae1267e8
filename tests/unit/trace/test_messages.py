from __future__ import annotations

import msgspec
import pytest

from latepix.trace.messages import (
    ImagePart,
    Message,
    TextPart,
    assistant_message,
    image_content_part,
    iter_images,
    system_message,
    user_message,
)
from tests.tiny.pictures import make_image


def test_content_keeps_its_reading_order() -> None:
    first, second = make_image(seed=1), make_image(seed=2)
    message = user_message("a", first, "b", second)
    assert message.content == (
        TextPart(text="a"),
        ImagePart(image=first),
        TextPart(text="b"),
        ImagePart(image=second),
    )
    assert message.text == "ab"


def test_pictures_are_walked_in_the_order_the_model_meets_them() -> None:
    a, b, c = (make_image(seed=seed) for seed in range(3))
    messages = [system_message(a), user_message("x", b, a), assistant_message("y"), user_message(c)]
    assert list(iter_images(messages)) == [a, b, a, c]


def test_pictures_travel_as_data_urls() -> None:
    image = make_image()
    assert user_message(image, "which?").to_openai() == {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": image.url}}, {"type": "text", "text": "which?"}],
    }
    assert image_content_part(image)["image_url"]["url"].startswith("data:image/png;base64,")


def test_a_tool_message_names_its_call() -> None:
    message = Message(role="tool", content=(TextPart(text="42"),), tool_call_id="call_0")
    assert message.to_openai()["tool_call_id"] == "call_0"


def test_tool_calls_are_kept() -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert Message(role="assistant", tool_calls=(call,)).to_openai()["tool_calls"] == [call]


@pytest.mark.parametrize(
    "message",
    [user_message("a", make_image()), assistant_message(""), Message(role="tool", tool_call_id="x", content=())],
)
def test_messages_survive_json(message: Message) -> None:
    assert msgspec.json.decode(msgspec.json.encode(message), type=Message) == message
