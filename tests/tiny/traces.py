"""Traces, samples and the facts of a model, without a model: a picture is a run of `IMAGE_ID`, text is any other id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from latepix.families.model_info import ModelInfo
from latepix.trace.graph import MessageNode, RolloutFailure, Trace
from latepix.trace.ingress import GridFit, InlineImage
from latepix.trace.messages import ImagePart, Message, TextPart, assistant_message
from latepix.trace.refs import MMRefs, PlaceholderRange
from latepix.trace.training import TrainingSample

IMAGE_ID = 9
VIDEO_ID = 8


def make_info(*, max_pixels: int = 1024 * 1024) -> ModelInfo:
    """Build the facts of a model whose pictures take one token per 32 x 32 pixels."""
    return ModelInfo(
        path=Path("no-model"),
        model_type="qwen3_vl",
        vocab_size=100,
        max_position_embeddings=8192,
        image_placeholder_id=IMAGE_ID,
        placeholder_ids=(IMAGE_ID, VIDEO_ID),
        banned_ids=(IMAGE_ID, VIDEO_ID),
        stop_ids=(7,),
        grid=GridFit(factor=32, min_pixels=1024, max_pixels=max_pixels),
        merge_size=2,
    )


def num_tokens(image: InlineImage) -> int:
    """Tokens of a picture whose sides are multiples of 32."""
    return image.width // 32 * (image.height // 32)


def make_user_node(
    *, parent: int | None = None, images: Sequence[InlineImage] = (), text_ids: Sequence[int] = (11, 12)
) -> MessageNode:
    """Build a prompt node: for each picture id 5, its placeholders, id 6; then the text."""
    token_ids: list[int] = []
    ranges = []
    for image in images:
        token_ids.append(5)
        ranges.append(PlaceholderRange(offset=len(token_ids), length=num_tokens(image)))
        token_ids += [IMAGE_ID] * num_tokens(image) + [6]
    token_ids += text_ids
    content = (*(ImagePart(image=image) for image in images), TextPart(text="question"))
    return MessageNode(
        parent=parent,
        message=Message(role="user", content=content),
        token_ids=tuple(token_ids),
        mask=(False,) * len(token_ids),
        ranges=tuple(ranges),
    )


def make_reply_node(
    *,
    parent: int | None,
    sampled_ids: Sequence[int] = (21, 7),
    logprobs: Sequence[float] | None = None,
    policy_version: int = 0,
    finish_reason: str = "stop",
    lead_ids: Sequence[int] = (3,),
) -> MessageNode:
    """Build an answer node: the generation prompt, then what was sampled."""
    values = [-0.5 - 0.25 * index for index in range(len(sampled_ids))] if logprobs is None else logprobs
    return MessageNode(
        parent=parent,
        message=assistant_message("answer"),
        token_ids=(*lead_ids, *sampled_ids),
        mask=(False,) * len(lead_ids) + (True,) * len(sampled_ids),
        logprobs=tuple(values),
        policy_version=policy_version,
        finish_reason=finish_reason,
    )


def make_trace(
    *,
    trace_id: str = "s0-g0-r0",
    images: Sequence[InlineImage] = (),
    nodes: Sequence[MessageNode] | None = None,
    group_id: int = 0,
    step: int = 0,
    split: Literal["train", "validation", "test"] = "train",
    reward: float | None = 1.0,
    advantage: float | None = 0.5,
    failure: RolloutFailure | None = None,
) -> Trace:
    """Build a trace, of one turn unless `nodes` are given."""
    if nodes is None:
        nodes = (make_user_node(images=images), make_reply_node(parent=0))
    return Trace(
        id=trace_id,
        environment="drawn",
        task_id="task-0",
        step=step,
        group_id=group_id,
        split=split,
        nodes=tuple(nodes),
        reward=None if failure else reward,
        reward_parts={} if failure else {"exact": 1.0},
        advantage=None if failure else advantage,
        failure=failure,
        answer="7",
    )


def make_sample(
    *,
    images: Sequence[InlineImage] = (),
    num_text: int = 3,
    num_sampled: int = 2,
    trace_id: str = "s0-g0-r0",
    group_id: int = 0,
    advantage: float = 0.5,
    temperature: float = 1.0,
    policy_version: int = 0,
) -> TrainingSample:
    """Build a sample: pictures, then text, then sampled tokens."""
    token_ids: list[int] = []
    slots = []
    for image in images:
        slots.append((image, len(token_ids), num_tokens(image)))
        token_ids += [IMAGE_ID] * num_tokens(image)
    token_ids += range(20, 20 + num_text + num_sampled)
    mask = np.zeros(len(token_ids), dtype=bool)
    mask[len(token_ids) - num_sampled :] = True
    return TrainingSample(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, np.float32(-0.75), np.float32(0)),
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        mm_refs=MMRefs.from_slots(slots),
        temperature=temperature,
        trace_id=trace_id,
        group_id=group_id,
        policy_version=policy_version,
    )
