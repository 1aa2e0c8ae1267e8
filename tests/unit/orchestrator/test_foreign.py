"""Traces of `verifiers` give the samples that the same conversation gives as our own trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latepix.errors import ConfigError, ImageError, PlaceholderMismatch, RolloutError
from latepix.orchestrator.batch import validate_sample
from latepix.orchestrator.foreign import iter_pictures
from latepix.orchestrator.samples import trace_to_samples
from latepix.trace.graph import MessageNode
from latepix.trace.ingress import InlineImage, ingest_image
from latepix.trace.messages import ImagePart, Message, TextPart
from latepix.trace.training import TrainingSample
from tests.tiny.foreign import CONVERSATIONS, A, B, C, foreign_message, foreign_trace, with_pictures
from tests.tiny.pictures import data_url, draw_picture, encode
from tests.tiny.traces import IMAGE_ID, VIDEO_ID, make_info, make_reply_node, make_trace, make_user_node

INFO = make_info()


def assert_equal_samples(ours: Sequence[TrainingSample], theirs: Sequence[TrainingSample]) -> None:
    """Compare everything but what a foreign trace does not know: the policy version."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        for field in ("token_ids", "loss_mask", "inference_logprobs", "advantages"):
            left, right = getattr(a, field), getattr(b, field)
            assert left.dtype == right.dtype, field
            np.testing.assert_array_equal(left, right, err_msg=field)
        assert a.mm_refs == b.mm_refs
        assert (a.trace_id, a.branch, a.group_id, a.temperature) == (b.trace_id, b.branch, b.group_id, b.temperature)
        assert b.policy_version == -1


@pytest.mark.parametrize("nodes", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_a_foreign_trace_gives_the_samples_of_our_own(vf: Any, nodes: list[MessageNode]) -> None:
    ours = trace_to_samples(make_trace(trace_id="t", nodes=nodes, advantage=-0.25), temperature=0.7)
    theirs = trace_to_samples(foreign_trace(vf, nodes), advantage=-0.25, temperature=0.7, info=INFO)
    assert_equal_samples(ours, theirs)
    for sample in theirs:
        validate_sample(sample, INFO)


@st.composite
def conversations(draw: st.DrawFn) -> list[MessageNode]:
    """Draw a message graph: every node hangs on an earlier one or starts anew."""
    nodes: list[MessageNode] = []
    for index in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *range(index)]))
        if draw(st.booleans()):
            ids = draw(st.lists(st.integers(20, 30), min_size=1, max_size=3))
            nodes.append(make_reply_node(parent=parent, sampled_ids=ids))
        else:
            images = draw(st.lists(st.sampled_from([A, B, C]), max_size=3))
            role = draw(st.sampled_from(["system", "user", "tool"]))
            gap = draw(st.sampled_from([(), (5,), (5, 6)]))
            nodes.append(with_pictures(*images, role=role, parent=parent, gap=gap))
    return nodes


@settings(max_examples=200, deadline=None)
@given(nodes=conversations())
def test_any_message_graph_gives_the_samples_of_our_own(vf: Any, nodes: list[MessageNode]) -> None:
    ours = trace_to_samples(make_trace(trace_id="t", nodes=nodes, advantage=2.0))
    assert_equal_samples(ours, trace_to_samples(foreign_trace(vf, nodes), advantage=2.0, info=INFO))


def test_text_needs_no_facts_of_the_model(vf: Any) -> None:
    nodes = CONVERSATIONS["text only"]
    ours = trace_to_samples(make_trace(trace_id="t", nodes=nodes, advantage=None))
    assert_equal_samples(ours, trace_to_samples(foreign_trace(vf, nodes)))


def test_pictures_need_the_facts_of_the_model(vf: Any) -> None:
    with pytest.raises(ConfigError, match=r"trace t, branch 0 has 2 pictures.*info=read_model_info"):
        trace_to_samples(foreign_trace(vf, [make_user_node(images=(A, B)), make_reply_node(parent=0)]))


def test_the_graph_that_verifiers_builds(vf: Any) -> None:
    """Two turns through its own `prepare_turn` and `commit`, then the first one edited."""
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.types import TurnTokens

    trace = foreign_trace(vf, [])
    user = foreign_message(vf, Message(role="user", content=(ImagePart(image=B), TextPart(text="look"))))
    tool = foreign_message(vf, Message(role="tool", content=(ImagePart(image=A), ImagePart(image=B)), tool_call_id="c"))
    edited = foreign_message(vf, Message(role="user", content=(ImagePart(image=A), TextPart(text="short"))))

    def play(
        prompt: list[Any], text: str, logical: list[int], ends: list[int], sampled: list[int], lengths: list[int]
    ) -> None:
        """Let the model answer; a prompt's tokens are given unexpanded, with the end of each message's own."""
        expanded: list[int] = []
        placed: list[tuple[int, int]] = []
        for token in logical:
            length = lengths[len(placed)] if token == IMAGE_ID else 1
            if token == IMAGE_ID:
                placed.append((len(expanded), length))
            expanded += [token] * length
        tokens = TurnTokens(
            prompt_ids=expanded,
            completion_ids=sampled,
            completion_logprobs=[-0.5] * len(sampled),
            renderer_prompt_ids=logical,
            message_spans=list(zip([0, *ends], ends, strict=False)),
            mm_placeholders=placed,
            mm_token_type_id_map={IMAGE_ID: 1},
        )
        reply = vf.AssistantMessage(content=text)
        response = vf.Response(id="r", created=0, model="m", message=reply, finish_reason="stop", tokens=tokens)
        prepare_turn(trace, prompt).commit(response)

    first = [5, IMAGE_ID, 6, 11, 3]
    play([user], "one", first, [4], [21, 7], [2])
    second = [*first, 21, 7, 12, IMAGE_ID, IMAGE_ID, 6, 3]
    said = vf.AssistantMessage(content="one")
    play([user, said, tool], "two", second, [4, 7, 11], [22, 7], [2, 1, 2])
    play([edited], "three", [5, IMAGE_ID, 6, 15, 3], [4], [23, 7], [1])

    joined, short = trace_to_samples(trace, info=INFO, advantage=1.0)
    assert joined.token_ids.tolist() == [5, 9, 9, 6, 11, 3, 21, 7, 12, 9, 9, 9, 6, 3, 22, 7]
    assert np.flatnonzero(joined.loss_mask).tolist() == [6, 7, 14, 15]
    assert joined.mm_refs.slots() == [(B, 1, 2), (A, 9, 1), (B, 10, 2)]
    assert short.token_ids.tolist() == [5, 9, 6, 15, 3, 23, 7]
    assert short.mm_refs.slots() == [(A, 1, 1)]
    assert trace.branches[0].mm_token_type_ids == joined.mm_token_type_ids.tolist()


def test_a_record_on_disk_gives_the_same_samples(vf: Any) -> None:
    trace = foreign_trace(vf, CONVERSATIONS["a shared prefix"])
    read_back = vf.WireTrace.model_validate(msgspec.json.decode(msgspec.json.encode(trace.to_record())))
    assert_equal_samples(trace_to_samples(trace, info=INFO), trace_to_samples(read_back, info=INFO))


def test_branches_that_share_a_picture_decode_it_once(vf: Any) -> None:
    seen = []

    def ingest(part: Any) -> InlineImage:
        seen.append(part)
        return ingest_image(part)

    trace = foreign_trace(vf, CONVERSATIONS["a shared prefix"])
    assert len(trace_to_samples(trace, info=INFO, ingest=ingest)) == 3
    assert len(seen) == 4  # of 8 slots in 3 branches


def test_a_picture_is_taken_as_the_server_saw_it(vf: Any) -> None:
    """Not on the grid, with alpha: the canonical form is another file, of the same size and number of tokens."""
    sent = encode(draw_picture(width=50, height=75, mode="RGBA"))
    node = with_pictures(B)
    foreign = foreign_trace(vf, [node, make_reply_node(parent=0)])
    foreign.nodes[0].message.content[1].image_url.url = data_url(sent)
    # 50 x 75 is processed as 64 x 64.
    foreign.nodes[0].token_ids = [13, 5, *[IMAGE_ID] * 4, 14]
    foreign.nodes[0].mask = [False] * 7
    (sample,) = trace_to_samples(foreign, info=INFO)
    (image,) = sample.mm_refs.images
    assert (image.width, image.height) == (50, 75)
    assert image == ingest_image(sent)
    assert sample.mm_refs.slots() == [(image, 2, 4)]
    validate_sample(sample, INFO)


class _Part(SimpleNamespace):
    """A part like those of pydantic, of a library that nobody has heard of."""

    def model_dump(self) -> dict[str, Any]:
        return dict(vars(self))


PARTS: dict[str, Callable[[str], Any]] = {
    "image_url": lambda url: {"type": "image_url", "image_url": {"url": url}},
    "image_url with detail": lambda url: {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
    "image_url as a string": lambda url: {"type": "image_url", "image_url": url},
    "image_url with the keys of other parts": lambda url: {"type": "image_url", "image_url": url, "text": None},
    "input_image": lambda url: {"type": "input_image", "image_url": url, "file_id": None},
    "image": lambda url: {"type": "image", "image": url},
    "image of Anthropic": lambda url: {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]},
    },
    "image of MCP": lambda url: {"type": "image", "data": url.partition(",")[2], "mimeType": "image/png"},
    "no type": lambda url: {"image_url": {"url": url}},
    "an object": lambda url: _Part(type="image_url", image_url={"url": url}),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("as_object", [True, False], ids=["message object", "message dict"])
def test_every_shape_of_part(vf: Any, part: Callable[[str], Any], as_object: bool) -> None:
    content = ["text alone", {"type": "text", "text": "look"}, part(A.url), {"type": "input_text", "text": "!"}]
    content = [*content, part(B.url), {"type": None, "text": "?", "image_url": None}]
    message = {"role": "user", "content": content}
    node = vf.MessageNode.model_construct(
        parent=None,
        message=SimpleNamespace(**message) if as_object else message,
        token_ids=[9, 5, 9, 9, 6],
        mask=[False] * 5,
        logprobs=[],
    )
    reply = vf.MessageNode(parent=0, message=vf.AssistantMessage(), token_ids=[7], mask=[True], logprobs=[-1.0])
    (sample,) = trace_to_samples(foreign_trace(vf, []).model_copy(update={"nodes": [node, reply]}), info=INFO)
    assert sample.mm_refs.slots() == [(A, 0, 1), (B, 2, 2)]


@pytest.mark.parametrize("content", ["text", None, [], ["text"], [{"type": "text", "text": "x"}], [{"type": "audio"}]])
def test_a_message_without_pictures(content: Any) -> None:
    assert list(iter_pictures({"role": "user", "content": content})) == []
    assert list(iter_pictures(SimpleNamespace(role="user", content=content))) == []


def broken(vf: Any, change: Callable[[Any], None], *images: InlineImage, gap: Sequence[int] = (5,)) -> Any:
    """Build a trace with these pictures in its third message, and change that message's node."""
    nodes = [make_user_node(), make_reply_node(parent=0), with_pictures(*images, role="tool", parent=1, gap=gap)]
    trace = foreign_trace(vf, [*nodes, make_reply_node(parent=2)])
    change(trace.nodes[2])
    return trace


def set_tokens(*token_ids: int) -> Callable[[Any], None]:
    """Return a change of a node's tokens."""

    def change(node: Any) -> None:
        node.token_ids = list(token_ids)
        node.mask = [False] * len(token_ids)

    return change


def drop_picture(number: int) -> Callable[[Any], None]:
    """Return a change that takes a picture out of a message."""

    def change(node: Any) -> None:
        del node.message.content[1 + number]

    return change


HERE = r"^trace t, branch 0, message 2 \(tool\), image "


@pytest.mark.parametrize(
    ("images", "gap", "change", "message"),
    [
        ([B], [5], set_tokens(13, 5, 9, 14), HERE + r"0: .*64 x 32 needs 2 tokens.* run \[7, 8\) has 1"),
        ([B], [5], set_tokens(13, 5, 9, 9, 9, 14), HERE + r"0: .* needs 2 tokens.* run \[7, 10\) has 3"),
        ([A, B], [5], set_tokens(13, 5, 9, 5, 9, 9, 9, 14), HERE + r"1: .* needs 2 tokens.* has 3"),
        ([C, B], [], set_tokens(13, *[9] * 7, 14), HERE + r"1: .* needs 2 tokens.* run \[12, 13\) has 1"),
        ([C, B], [], set_tokens(13, *[9] * 9, 14), HERE + r"1: .* needs 2 tokens.* run \[12, 15\) has 3"),
        ([C, B], [5], set_tokens(13, *[9] * 6, 14), HERE + r"1: .* needs 2 tokens, 0 placeholder.* 2 pictures and 1"),
        ([B], [5], set_tokens(13, 14), HERE + r"0: .* needs 2 tokens, 0 placeholder tokens are left"),
        ([C, A], [5], drop_picture(0), HERE + r"0: .*32 x 32 needs 1 tokens.* has 6.* 1 pictures and 2 placeholder"),
        ([C, A], [5], drop_picture(1), r"0, image 1: .* \[14, 15\) of 1 tokens has 0 pictures.* 1 pictures and 2"),
        ([A], [5], drop_picture(0), r"branch 0, image 0: .* of 1 tokens has 0 pictures.* 0 pictures and 1 placeholder"),
        ([], [], set_tokens(13, VIDEO_ID, 14), r"trace t, branch 0: 1 tokens stand for other media .* at 6"),
    ],
)  # fmt: skip
def test_pictures_and_placeholders_must_agree(
    vf: Any, images: list[InlineImage], gap: list[int], change: Callable[[Any], None], message: str
) -> None:
    with pytest.raises(PlaceholderMismatch, match=message):
        trace_to_samples(broken(vf, change, *images, gap=gap), info=INFO)


def test_another_picture_in_the_second_branch_names_that_branch(vf: Any) -> None:
    trace = foreign_trace(vf, CONVERSATIONS["edited history"])
    trace.nodes[2].message.content[0].image_url.url = C.url
    with pytest.raises(
        PlaceholderMismatch, match=r"trace t, branch 1, message 0 \(user\), image 0: .* 6 tokens.* has 2"
    ):
        trace_to_samples(trace, info=INFO)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (data_url(b"no picture"), "not_an_image"),
        (data_url(A.data[:-20]), "truncated"),
        ("data:image/png;base64,***", "bad_base64"),
        ("https://example.com/picture.png", "not_allowed"),
        ("", "unsupported_source"),
    ],
)
def test_a_picture_that_ingress_refuses_is_named(vf: Any, url: str, reason: str) -> None:
    def change(node: Any) -> None:
        node.message.content[2].image_url.url = url

    with pytest.raises(ImageError, match=HERE + "1: ") as caught:
        trace_to_samples(broken(vf, change, B, A), info=INFO)
    assert caught.value.reason == reason


def test_errors_count_the_pictures_of_a_branch_through(vf: Any) -> None:
    trace = foreign_trace(vf, CONVERSATIONS["pictures in system, user and tool messages"])
    trace.nodes[3].message.content[1].image_url.url = data_url(b"no picture")
    with pytest.raises(ImageError, match=r"^trace t, branch 0, message 3 \(tool\), image 3: "):
        trace_to_samples(trace, info=INFO)


def test_pictures_that_were_taken_out_are_noticed_without_facts_of_the_model(vf: Any) -> None:
    trace = broken(vf, drop_picture(0), B)
    trace.mm_token_type_id_map = {IMAGE_ID: 1}
    with pytest.raises(PlaceholderMismatch, match=r"trace t, branch 0: 0 pictures, but 2 placeholder tokens"):
        trace_to_samples(trace)


def test_a_sampled_placeholder_is_refused(vf: Any) -> None:
    trace = foreign_trace(vf, [make_user_node(images=(A,)), make_reply_node(parent=0, sampled_ids=(21, IMAGE_ID, 7))])
    with pytest.raises(
        PlaceholderMismatch, match=r"trace t, branch 0: .* sampled 1 placeholder tokens, the first at 7"
    ):
        trace_to_samples(trace, info=INFO)


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("mask", [True], PlaceholderMismatch, r"message 1 \(assistant\): 2 tokens, but a mask of 1 values"),
        ("logprobs", [-0.5], PlaceholderMismatch, r"message 1 \(assistant\): 2 sampled tokens, but 1 logprobs"),
        ("logprobs", [], PlaceholderMismatch, r"2 sampled tokens, but 0 logprobs"),
        ("advantages", [1.0, 1.0, 1.0], PlaceholderMismatch, r"2 sampled tokens, but 3 advantages"),
        ("logprobs", [-0.5, float("nan")], RolloutError, r"message 1 \(assistant\): logprobs hold a value that is NaN"),
        ("advantages", [float("inf"), 0.0], RolloutError, r"message 1 \(assistant\): advantages hold a value"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    vf: Any, field: str, value: list[Any], error: type[Exception], message: str
) -> None:
    trace = foreign_trace(vf, [make_user_node(images=(B,)), make_reply_node(parent=0, lead_ids=())])
    setattr(trace.nodes[1], field, value)
    with pytest.raises(error, match="^trace t, branch 0, .*" + message):
        trace_to_samples(trace, info=INFO)


def test_branches_of_copied_nodes_are_refused() -> None:
    def node() -> SimpleNamespace:
        return SimpleNamespace(
            parent=None, message={"role": "user"}, token_ids=[1, 2], mask=[False, True], logprobs=[-1.0]
        )

    nodes = [node()]
    good = SimpleNamespace(id="t", nodes=nodes, branches=[SimpleNamespace(nodes=nodes)])
    assert len(trace_to_samples(good)) == 1
    copied = SimpleNamespace(id="t", nodes=nodes, branches=[SimpleNamespace(nodes=[node()])])
    with pytest.raises(PlaceholderMismatch, match="trace t, branch 0: message 0 is none of the 1 objects"):
        trace_to_samples(copied)
