"""Traces of `verifiers` from nodes of ours; nothing here imports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from latepix.trace.graph import MessageNode
from latepix.trace.ingress import InlineImage
from latepix.trace.messages import ImagePart, Message, TextPart
from latepix.trace.refs import PlaceholderRange
from tests.tiny.pictures import make_image
from tests.tiny.traces import IMAGE_ID, make_reply_node, make_user_node, num_tokens

A, B, C = make_image(seed=1), make_image(width=64, seed=2), make_image(width=96, height=64, seed=3)


def foreign_message(vf: Any, message: Message) -> Any:
    """Say one of our messages with the types of `verifiers`."""
    if message.role == "assistant":
        return vf.AssistantMessage(content=message.text)
    content = message.to_openai()["content"]
    if message.role == "tool":
        return vf.ToolMessage(tool_call_id=message.tool_call_id or "call-0", content=content)
    return {"system": vf.SystemMessage, "user": vf.UserMessage}[message.role](content=content)


def foreign_trace(vf: Any, nodes: Sequence[MessageNode | Any], *, trainable: bool = True, **fields: Any) -> Any:
    """Build a completed trace of `verifiers` from nodes of ours (or of its own)."""
    own = [
        vf.MessageNode(
            parent=node.parent,
            message=foreign_message(vf, node.message),
            sampled=any(node.mask),
            token_ids=list(node.token_ids),
            mask=list(node.mask),
            logprobs=list(node.logprobs),
        )
        if isinstance(node, MessageNode)
        else node
        for node in nodes
    ]
    settings = {"id": "t", "is_completed": True, "ok": True, "nodes": own} | fields
    return vf.Trace(
        task=vf.TraceTask(type="Drawn", data=vf.TaskData()),
        agent=vf.AgentInfo(config=vf.AgentConfig(), trainable=trainable),
        **settings,
    )


def with_pictures(
    *images: InlineImage, role: str = "user", parent: int | None = None, gap: Sequence[int] = (5,)
) -> MessageNode:
    """Build a node with pictures and, between them, the ids of `gap`; an empty one lets their tokens touch."""
    token_ids: list[int] = [13]
    ranges = []
    for image in images:
        token_ids += gap
        ranges.append(PlaceholderRange(offset=len(token_ids), length=num_tokens(image)))
        token_ids += [IMAGE_ID] * num_tokens(image)
    token_ids.append(14)
    return MessageNode(
        parent=parent,
        message=Message(role=role, content=(TextPart(text="look"), *(ImagePart(image=image) for image in images))),  # ty: ignore[invalid-argument-type]
        token_ids=tuple(token_ids),
        mask=(False,) * len(token_ids),
        ranges=tuple(ranges),
    )


#: Conversations by what is special about them, as nodes of ours.
CONVERSATIONS = {
    "text only": [make_user_node(), make_reply_node(parent=0)],
    "one picture": [make_user_node(images=(B,)), make_reply_node(parent=0)],
    "several pictures": [make_user_node(images=(C, A, B)), make_reply_node(parent=0)],
    "the same picture twice": [make_user_node(images=(B, A, B)), make_reply_node(parent=0)],
    "pictures that touch": [with_pictures(C, A, B, gap=()), make_reply_node(parent=0)],
    "equal pictures that touch": [with_pictures(B, B, gap=()), make_reply_node(parent=0)],
    "pictures in system, user and tool messages": [
        with_pictures(A, role="system"),
        with_pictures(C, B, parent=0),
        make_reply_node(parent=1),
        with_pictures(B, role="tool", parent=2, gap=()),
        make_reply_node(parent=3, sampled_ids=(31, 32, 7)),
    ],
    "a shared prefix": [
        make_user_node(images=(A,)),
        make_reply_node(parent=0),
        with_pictures(B, role="tool", parent=1),
        make_reply_node(parent=2),
        with_pictures(C, A, role="tool", parent=1, gap=()),
        make_reply_node(parent=4),
        make_reply_node(parent=4, sampled_ids=(33, 7)),
    ],
    "edited history": [
        make_user_node(images=(A, B)),
        make_reply_node(parent=0),
        make_user_node(images=(B,)),
        make_reply_node(parent=2, sampled_ids=(41, 42, 43, 7)),
    ],
    "a branch with nothing to train": [
        make_user_node(),
        make_reply_node(parent=0),
        make_user_node(parent=1),
        make_user_node(parent=1, images=(A,)),
        make_reply_node(parent=3),
    ],
    "a first token that was sampled": [make_reply_node(parent=None, lead_ids=(), sampled_ids=(21, 22, 7))],
    "no message": [],
}
