"""Selected rollouts -> what the page writes down: conversations, pictures in place, sampled tokens.

In: the groups of a `RunReport`. Out: frozen views that the template only has to print. What siblings share (the
prompt and its pictures) is lifted out of them, so that it is shown once and the answers stand side by side.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from latepix.report.collect import RolloutGroup, RolloutSource
from latepix.report.numbers import format_number
from latepix.trace.graph import MessageNode, Trace
from latepix.trace.ingress import InlineImage
from latepix.trace.messages import ImagePart

Outcome: TypeAlias = Literal["correct", "partial", "wrong", "failed"]
Pictures: TypeAlias = Mapping[str, str | None]
TokenWriter: TypeAlias = Callable[[int], str]

#: Sampled tokens written out per rollout.
MAX_TOKENS = 256
_SMALL_PX, _LARGE_PX = 96, 320
_SHORT_ANSWER = 40
_VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣"})


class PictureView(msgspec.Struct, frozen=True):
    """A picture in place: data URL (None: missing), width on the page in CSS pixels, caption in pieces."""

    url: str | None
    width: int
    is_pixelated: bool
    caption: tuple[str, ...]


class MessageView(msgspec.Struct, frozen=True):
    """One message: who speaks, texts and pictures in reading order, tool calls one a line."""

    role: str
    parts: tuple[str | PictureView, ...]
    tool_calls: str = ""
    is_sampled: bool = False


class TokenView(msgspec.Struct, frozen=True):
    """A sampled token: its text, its probability (0 to 1, for shading) and what hovering says."""

    text: str
    probability: float
    hint: str


class RolloutView(msgspec.Struct, frozen=True):
    """One sibling: what it adds to the shared prompt, and how it did."""

    id: str
    outcome: Outcome
    reward: str
    reward_parts: str
    advantage: str
    messages: tuple[MessageView, ...]
    tokens: tuple[TokenView, ...]
    num_tokens: int
    remark: str
    failure: str


class GroupView(msgspec.Struct, frozen=True):
    """Siblings of one prompt; `is_wide` if their answers need room."""

    title: str
    prompt: tuple[MessageView, ...]
    answer: str
    rollouts: tuple[RolloutView, ...]
    is_wide: bool


class SourceView(msgspec.Struct, frozen=True):
    """One entry of the step selector."""

    key: str
    label: str
    note: str
    groups: tuple[GroupView, ...]


def view_source(source: RolloutSource, pictures: Pictures, write_token: TokenWriter | None) -> SourceView:
    """Prepare the selected rollouts of one step, evaluation or the quarantine."""
    label = {
        "train": f"step {source.step:,}",
        "eval": f"held-out, v{source.step:,}",
        "quarantine": "quarantine",
    }[source.kind]
    many = "rollouts" if source.num_rollouts != 1 else "rollout"
    note = f"{source.num_shown:,} of {source.num_rollouts:,} {many} shown"
    if source.kind == "eval":
        note += ", misses first picked" if source.num_shown < source.num_rollouts else ""
    if source.reward_mean is not None:
        note += f" · mean reward {source.reward_mean:.3f}"
    return SourceView(
        key=f"{source.kind}-{source.step}",
        label=label,
        note=note,
        groups=tuple(view_group(group, pictures, write_token) for group in source.groups),
    )


def view_group(group: RolloutGroup, pictures: Pictures, write_token: TokenWriter | None) -> GroupView:
    """Prepare siblings: the prompt they share, then each one's own messages."""
    paths = [_path(trace) for trace in group.traces]
    num_shared = _num_shared([path for path in paths if path])
    prompt = next((path[:num_shared] for path in paths if path), [])
    rollouts = tuple(
        _view_rollout(trace, path[num_shared:], pictures, write_token)
        for trace, path in zip(group.traces, paths, strict=True)
    )
    first = group.traces[0]
    return GroupView(
        title=first.task_id,
        prompt=tuple(_view_message(node, pictures) for node in prompt),
        answer=first.answer,
        rollouts=rollouts,
        is_wide=any(_is_long(rollout) for rollout in rollouts),
    )


def outcome_of(trace: Trace) -> Outcome:
    """Sort a rollout by its reward: 1 or more is correct, 0 or less is wrong, between is partial."""
    if trace.failure is not None or trace.reward is None:
        return "failed"
    if trace.reward >= 1:
        return "correct"
    return "partial" if trace.reward > 0 else "wrong"


def _path(trace: Trace) -> list[MessageNode]:
    branches = trace.branches
    return branches[-1].nodes if branches else []


def _num_shared(paths: Sequence[Sequence[MessageNode]]) -> int:
    count = 0
    for siblings in zip(*paths, strict=False):
        first = siblings[0]
        if any(any(node.mask) or node.finish_reason or node.message != first.message for node in siblings):
            break
        count += 1
    return count


def _is_long(rollout: RolloutView) -> bool:
    if len(rollout.messages) > 1 or rollout.failure:
        return True
    return any(len(part) > _SHORT_ANSWER for m in rollout.messages for part in m.parts if isinstance(part, str))


def _view_rollout(
    trace: Trace, nodes: Sequence[MessageNode], pictures: Pictures, write_token: TokenWriter | None
) -> RolloutView:
    outcome = outcome_of(trace)
    tokens = [
        (token_id, logprob)
        for node in nodes
        for token_id, logprob in zip(
            (token_id for token_id, sampled in zip(node.token_ids, node.mask, strict=False) if sampled),
            node.logprobs,
            strict=False,
        )
    ]
    remarks = []
    if trace.is_truncated:
        remarks.append("cut at the token limit")
    if len(trace.branches) > 1:
        remarks.append(f"last of {len(trace.branches)} branches")
    return RolloutView(
        id=trace.id,
        outcome=outcome,
        reward="failed" if outcome == "failed" else format_number(trace.reward or 0.0),
        reward_parts=", ".join(f"{name} {format_number(value)}" for name, value in trace.reward_parts.items()),
        advantage=_signed(trace.advantage),
        messages=tuple(_view_message(node, pictures) for node in nodes),
        tokens=tuple(_view_token(*token, write_token) for token in tokens[:MAX_TOKENS]),
        num_tokens=len(tokens),
        remark=" · ".join(remarks),
        failure=f"{trace.failure.reason}: {trace.failure.message}" if trace.failure else "",
    )


def _signed(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:+.2f}".replace("-", "\N{MINUS SIGN}") if value else "0"


def _view_token(token_id: int, logprob: float, write_token: TokenWriter | None) -> TokenView:
    text = write_token(token_id).translate(_VISIBLE) if write_token else ""
    probability = math.exp(min(0.0, logprob))
    hint = f"token {token_id} · logprob {logprob:.4g} · probability {probability:.3g}"
    return TokenView(text=text or str(token_id), probability=round(probability, 3), hint=hint)


def _view_message(node: MessageNode, pictures: Pictures) -> MessageView:
    parts: list[str | PictureView] = []
    slot = 0
    for part in node.message.content:
        if isinstance(part, ImagePart):
            num_tokens = node.ranges[slot].length if slot < len(node.ranges) else None
            parts.append(_view_picture(part.image, num_tokens, pictures))
            slot += 1
        elif part.text:
            parts.append(part.text)
    return MessageView(
        role=node.message.role,
        parts=tuple(parts),
        tool_calls="\n".join(_write_call(call) for call in node.message.tool_calls),
        is_sampled=node.finish_reason is not None or any(node.mask),
    )


def _write_call(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    if not isinstance(function, Mapping) or "name" not in function:
        return json.dumps(call, ensure_ascii=False)
    arguments = function.get("arguments", "")
    return (
        f"{function['name']}({arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)})"
    )


def _view_picture(image: InlineImage, num_tokens: int | None, pictures: Pictures) -> PictureView:
    longest = max(image.width, image.height, 1)
    # Small pictures grow by whole factors, so that every pixel the model saw is a square of the same size.
    factor = max(1, _SMALL_PX // longest)
    width = image.width * factor if longest <= _LARGE_PX else round(image.width * _LARGE_PX / longest)
    caption = [f"{image.width} \N{MULTIPLICATION SIGN} {image.height} px"]
    if num_tokens is not None:
        caption.append(f"{num_tokens:,} image token{'s' if num_tokens != 1 else ''}")
    return PictureView(
        url=pictures.get(image.sha256),
        width=max(1, width),
        is_pixelated=longest <= _SMALL_PX,
        caption=tuple(caption),
    )
