"""The record of one rollout: a graph of messages with the tokens the server saw.

Made by `TraceBuilder` (one `commit_turn` per answer of the server), read by `orchestrator/samples.py` and the report.
What holds, and is checked when a turn is committed:

* the node tokens along a branch equal the ids the server saw (its `prompt_token_ids`, then what was sampled);
* every picture of a node has exactly one placeholder range, relative to the node's first token;
* a node keeps only the tokens it adds; text the policy sampled is never tokenized again.

The tokens of the generation prompt (`<|im_start|>assistant`) belong to the assistant's node and are not sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Literal

import msgspec
import numpy as np

from latepix.errors import PlaceholderMismatch
from latepix.trace.messages import Message, iter_images
from latepix.trace.refs import MMRefs, PlaceholderRange


class PolicySpan(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens [start, end) of a node came from weights `policy_version`."""

    policy_version: int
    start: int
    end: int


class MessageNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of the graph and the tokens it adds.

    Attributes:
        parent: index of the node before it, None for a first message.
        message: who said what, with pictures in place.
        token_ids: expanded ids, one placeholder run per picture.
        mask: per token, whether the policy sampled it.
        logprobs: per sampled token, in nats, by the server, under the distribution it sampled from.
        ranges: placeholder runs relative to the node's first token, one per picture of `message`.
        policy_version: oldest weights that sampled one of its tokens, None for a node that was not sampled.
        policy_spans: which weights sampled which of its sampled tokens, if they changed in between; else empty.
        finish_reason: `stop` or `length`, for a sampled node.
    """

    parent: int | None
    message: Message
    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...] = ()
    ranges: tuple[PlaceholderRange, ...] = ()
    policy_version: int | None = None
    policy_spans: tuple[PolicySpan, ...] = ()
    finish_reason: str | None = None


class RolloutFailure(msgspec.Struct, frozen=True):
    """Why a rollout was set aside: a stable code, and the message of the error."""

    reason: str
    message: str


class Trace(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of one rollout.

    Attributes:
        id: unique in the run, `s3-g7-r2` for the third rollout of group 7 in step 3.
        environment, task_id, split: what was played.
        step: training step (or, for an evaluation, the policy version) it was played for.
        group_id: siblings of one prompt share it.
        nodes: the message graph; a node comes after its parent.
        reward: the environment's scalar; None if the rollout failed.
        reward_parts: named parts of the reward, for people.
        advantage: reward relative to the group, set once the group is complete.
        failure: set if the rollout failed.
        is_out_of_room: the conversation filled the model's length; answers after that were empty.
        answer: the task's expected answer, for people.
        task_index: of the task in its split; -1 if not known, and then it cannot be replayed.
        seed: sampling seed of the first turn.
        temperature: it was sampled at.
    """

    id: str
    environment: str
    task_id: str
    step: int = 0
    group_id: int = 0
    split: Literal["train", "validation", "test"] = "train"
    nodes: tuple[MessageNode, ...] = ()
    reward: float | None = None
    reward_parts: dict[str, float] = {}
    advantage: float | None = None
    failure: RolloutFailure | None = None
    is_out_of_room: bool = False
    answer: str = ""
    task_index: int = -1
    seed: int = 0
    temperature: float = 1.0

    @property
    def branches(self) -> list[Branch]:
        """Root-to-leaf paths, in the order of their leaves."""
        parents = {node.parent for node in self.nodes}
        branches = []
        for leaf in range(len(self.nodes)):
            if leaf in parents:
                continue
            path: list[int] = []
            index: int | None = leaf
            while index is not None:
                path.append(index)
                index = self.nodes[index].parent
            branches.append(Branch(self, tuple(reversed(path))))
        return branches

    @property
    def is_truncated(self) -> bool:
        """Whether any answer was cut at the token limit, or left out because the model's length was full."""
        return self.is_out_of_room or any(node.finish_reason == "length" for node in self.nodes)

    @property
    def num_tokens(self) -> int:
        """Tokens of all nodes, each counted once."""
        return sum(len(node.token_ids) for node in self.nodes)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy sampled, each counted once."""
        return sum(sum(node.mask) for node in self.nodes)


class Branch:
    """One root-to-leaf path of a trace; gives one training sample.

    Attributes:
        trace: the trace it belongs to.
        node_indices: the path, root first.
    """

    def __init__(self, trace: Trace, node_indices: tuple[int, ...]) -> None:
        self.trace = trace
        self.node_indices = node_indices

    @property
    def nodes(self) -> list[MessageNode]:
        """The path's nodes, root first."""
        return [self.trace.nodes[index] for index in self.node_indices]

    @property
    def messages(self) -> list[Message]:
        """The conversation along the path."""
        return [node.message for node in self.nodes]

    @cached_property
    def node_starts(self) -> list[int]:
        """Offset of each node's first token in `token_ids`, and the total length at the end."""
        return [0, *accumulate(len(node.token_ids) for node in self.nodes)]

    @cached_property
    def token_ids(self) -> np.ndarray:
        """[T] int32: the ids the server saw."""
        return np.asarray([token for node in self.nodes for token in node.token_ids], dtype=np.int32)

    @cached_property
    def sampled_mask(self) -> np.ndarray:
        """[T] bool: tokens the policy sampled."""
        return np.asarray([sampled for node in self.nodes for sampled in node.mask], dtype=bool)

    @cached_property
    def logprobs(self) -> np.ndarray:
        """[T] float32, nats, by the server; 0 where the token was not sampled."""
        logprobs = np.zeros(len(self.token_ids), dtype=np.float32)
        logprobs[self.sampled_mask] = [value for node in self.nodes for value in node.logprobs]
        return logprobs

    @property
    def mm_refs(self) -> MMRefs:
        """The pictures of the path and where they sit in `token_ids`."""
        return MMRefs.from_slots(
            (image, start + placed.offset, placed.length)
            for start, node in zip(self.node_starts, self.nodes, strict=False)
            for image, placed in zip(iter_images([node.message]), node.ranges, strict=True)
        )


def align_expansion(
    logical_ids: Sequence[int],
    effective_ids: Sequence[int],
    ranges: Sequence[PlaceholderRange],
    placeholder_ids: Collection[int],
    *,
    where: str,
) -> list[int]:
    """Check that the server expanded exactly the prompt it was sent, and return where each slot landed.

    Args:
        logical_ids: the prompt as sent, one placeholder per picture.
        effective_ids: the server's `prompt_token_ids`.
        ranges: the server's `mm_placeholders` in prompt order, absolute.
        placeholder_ids: ids that stand for pictures.
        where: names trace and turn in the error.
    Returns:
        The positions of the placeholders in `logical_ids`, parallel to `ranges`.
    Raises:
        PlaceholderMismatch: the first difference, with its numbers.
    """
    slots = [index for index, token in enumerate(logical_ids) if token in placeholder_ids]
    if len(slots) != len(ranges):
        raise PlaceholderMismatch(
            f"{where}: the prompt has {len(slots)} pictures, the server answered {len(ranges)} placeholder ranges."
        )
    logical_at = effective_at = 0
    for number, (slot, placed) in enumerate(zip(slots, ranges, strict=True)):
        num_text = slot - logical_at
        if placed.length < 1 or placed.offset != effective_at + num_text:
            raise PlaceholderMismatch(
                f"{where}, picture {number}: the server placed it at [{placed.offset}, "
                f"{placed.offset + placed.length}), the prompt has it at {effective_at + num_text}."
            )
        end = placed.offset + placed.length
        _check_same_text(logical_ids, logical_at, effective_ids, effective_at, num_text, where)
        run = effective_ids[placed.offset : end]
        if len(run) != placed.length or not all(token in placeholder_ids for token in run):
            raise PlaceholderMismatch(
                f"{where}, picture {number}: range [{placed.offset}, {end}) covers tokens that are not image "
                f"placeholders, or ends behind the prompt's {len(effective_ids)} tokens."
            )
        logical_at, effective_at = slot + 1, end
    num_text = len(logical_ids) - logical_at
    if len(effective_ids) - effective_at != num_text:
        raise PlaceholderMismatch(
            f"{where}: after the last picture the prompt has {num_text} tokens, the server's has "
            f"{len(effective_ids) - effective_at}."
        )
    _check_same_text(logical_ids, logical_at, effective_ids, effective_at, num_text, where)
    return slots


def _check_same_text(
    logical_ids: Sequence[int],
    logical_at: int,
    effective_ids: Sequence[int],
    effective_at: int,
    length: int,
    where: str,
) -> None:
    sent = list(logical_ids[logical_at : logical_at + length])
    got = list(effective_ids[effective_at : effective_at + length])
    if sent != got:
        index = next((i for i, (a, b) in enumerate(zip(sent, got, strict=False)) if a != b), min(len(sent), len(got)))
        raise PlaceholderMismatch(
            f"{where}: token {logical_at + index} of the prompt was sent as {sent[index : index + 1]}, the server used "
            f"{got[index : index + 1]} at {effective_at + index}. The server must not change the prompt's text."
        )


class TraceBuilder:
    """Collects the turns of one rollout; the only writer of message nodes.

    A turn is committed as a whole or not at all. The builder keeps the logical and the effective ids of the current
    path side by side, so that the next prompt can be rendered from the former and compared with the latter.
    """

    def __init__(self, trace_id: str, placeholder_ids: Collection[int]) -> None:
        self.trace_id = trace_id
        self.placeholder_ids = frozenset(placeholder_ids)
        self.nodes: list[MessageNode] = []
        self.leaf: int | None = None
        self.logical_ids: list[int] = []
        self.effective_ids: list[int] = []

    def position(self) -> Position:
        """Return where the conversation stands, for `go_back`."""
        return Position(leaf=self.leaf, logical_ids=tuple(self.logical_ids), effective_ids=tuple(self.effective_ids))

    def go_back(self, position: Position | None = None) -> None:
        """Let the next turn go on from an earlier position; None is the root, for a prompt that is rendered anew."""
        position = position or Position(leaf=None, logical_ids=(), effective_ids=())
        self.leaf = position.leaf
        self.logical_ids = list(position.logical_ids)
        self.effective_ids = list(position.effective_ids)

    def commit_turn(
        self,
        *,
        messages: Sequence[Message],
        message_ends: Sequence[int],
        logical_ids: Sequence[int],
        effective_ids: Sequence[int],
        ranges: Sequence[PlaceholderRange],
        reply: Message,
        sampled_ids: Sequence[int],
        logprobs: Sequence[float],
        policy_version: int | None,
        finish_reason: str,
        policy_spans: Sequence[PolicySpan] = (),
    ) -> None:
        """Add the new messages of a turn and the sampled reply.

        A message that an earlier branch already has, with the same tokens after the same nodes, is not stored again:
        the branches share it.

        Args:
            messages: messages that are new in this turn.
            message_ends: per new message, the end of its tokens in `logical_ids`.
            logical_ids: the whole prompt as it was sent.
            effective_ids: the whole prompt as the server expanded it.
            ranges: all placeholder ranges of the prompt, absolute, in order.
            reply: the parsed answer.
            sampled_ids, logprobs: the answer's tokens and their log-probabilities, equally long.
            policy_version: oldest weights that sampled one of the tokens.
            finish_reason: `stop` or `length`.
            policy_spans: of the sampled tokens, if the weights changed in between.
        Raises:
            PlaceholderMismatch: the answer does not fit; the trace is unchanged.
        """
        where = f"trace {self.trace_id}, turn {sum(node.finish_reason is not None for node in self.nodes)}"
        self._check_sampled(sampled_ids, logprobs, where)
        slots = align_expansion(logical_ids, effective_ids, ranges, self.placeholder_ids, where=where)
        history = len(self.effective_ids)
        if list(effective_ids[:history]) != self.effective_ids:
            raise PlaceholderMismatch(
                f"{where}: the server's prompt does not start with the {history} tokens of the turns before."
            )
        ends = _effective_ends(message_ends, slots, ranges)
        nodes, parent, start = self._add_messages(messages, ends, effective_ids, ranges, where)
        if any(placed.offset >= start for placed in ranges):
            raise PlaceholderMismatch(f"{where}: a placeholder range lies behind the last message.")
        lead = tuple(effective_ids[start:])
        nodes.append(
            MessageNode(
                parent=parent,
                message=reply,
                token_ids=lead + tuple(sampled_ids),
                mask=(False,) * len(lead) + (True,) * len(sampled_ids),
                logprobs=tuple(logprobs),
                policy_version=policy_version,
                policy_spans=tuple(policy_spans),
                finish_reason=finish_reason,
            )
        )
        self.nodes = nodes
        self.leaf = len(nodes) - 1
        self.logical_ids = [*logical_ids, *sampled_ids]
        self.effective_ids = [*effective_ids, *sampled_ids]

    def _add_messages(
        self,
        messages: Sequence[Message],
        ends: Sequence[int],
        effective_ids: Sequence[int],
        ranges: Sequence[PlaceholderRange],
        where: str,
    ) -> tuple[list[MessageNode], int | None, int]:
        """Return the nodes with the new messages, the last message's index, and the end of its tokens."""
        nodes = list(self.nodes)
        parent, start = self.leaf, len(self.effective_ids)
        for message, end in zip(messages, ends, strict=True):
            inside = tuple(
                PlaceholderRange(offset=placed.offset - start, length=placed.length)
                for placed in ranges
                if start <= placed.offset < end
            )
            num_images = sum(1 for _ in iter_images([message]))
            if len(inside) != num_images:
                raise PlaceholderMismatch(
                    f"{where}: the {message.role} message has {num_images} pictures, its tokens {len(inside)} ranges."
                )
            token_ids = tuple(effective_ids[start:end])
            shared = _find_shared(nodes, parent, message, token_ids, inside)
            if shared is None:
                mask = (False,) * len(token_ids)
                nodes.append(MessageNode(parent=parent, message=message, token_ids=token_ids, mask=mask, ranges=inside))
                shared = len(nodes) - 1
            # Tokens behind a shared answer (the template's line break) go to the message that follows.
            parent, start = shared, start + len(nodes[shared].token_ids)
        return nodes, parent, start

    def _check_sampled(self, sampled_ids: Sequence[int], logprobs: Sequence[float], where: str) -> None:
        if len(sampled_ids) != len(logprobs):
            raise PlaceholderMismatch(f"{where}: {len(sampled_ids)} sampled tokens but {len(logprobs)} logprobs.")
        if placeholders := self.placeholder_ids.intersection(sampled_ids):
            raise PlaceholderMismatch(
                f"{where}: the server sampled {sorted(placeholders)}, which stand for pictures. It must honour the "
                "bans in the request's logit_bias."
            )


class Position(msgspec.Struct, frozen=True):
    """A point in a conversation: the last node, and the tokens up to it, unexpanded and expanded."""

    leaf: int | None
    logical_ids: tuple[int, ...]
    effective_ids: tuple[int, ...]


def _effective_ends(message_ends: Sequence[int], slots: Sequence[int], ranges: Sequence[PlaceholderRange]) -> list[int]:
    """Return the ends of messages in the expanded prompt, from those in the logical one."""
    ends = []
    number = grown = 0
    for end in message_ends:
        while number < len(slots) and slots[number] < end:
            grown += ranges[number].length - 1
            number += 1
        ends.append(end + grown)
    return ends


def _find_shared(
    nodes: Sequence[MessageNode],
    parent: int | None,
    message: Message,
    token_ids: tuple[int, ...],
    ranges: tuple[PlaceholderRange, ...],
) -> int | None:
    """Return a node that already says this message with the first of these tokens after the same nodes."""
    for index, node in enumerate(nodes):
        if (
            node.parent == parent
            and node.message == message
            and node.ranges == ranges
            and token_ids[: len(node.token_ids)] == node.token_ids
        ):
            return index
    return None
