from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from latepix.errors import PlaceholderMismatch
from latepix.orchestrator.samples import trace_to_samples
from latepix.trace.graph import Trace, TraceBuilder
from latepix.trace.messages import assistant_message, iter_images, system_message, user_message
from latepix.trace.refs import PlaceholderRange
from tests.tiny.pictures import make_image
from tests.tiny.traces import IMAGE_ID, VIDEO_ID, make_reply_node, make_trace, make_user_node

A, B = make_image(seed=1), make_image(seed=2)

#: A first turn: system [1 2], user [5 <A> 6 11 12], generation prompt [3]; the picture takes 3 tokens.
FIRST: dict[str, Any] = {
    "messages": (system_message("be brief"), user_message(A, "which?")),
    "message_ends": [2, 7],
    "logical_ids": [1, 2, 5, IMAGE_ID, 6, 11, 12, 3],
    "effective_ids": [1, 2, 5, IMAGE_ID, IMAGE_ID, IMAGE_ID, 6, 11, 12, 3],
    "ranges": [PlaceholderRange(3, 3)],
    "reply": assistant_message("7"),
    "sampled_ids": [21, 7],
    "logprobs": [-0.5, -0.25],
    "policy_version": 4,
    "finish_reason": "stop",
}
#: A second turn that extends it: user [13 <B> 14], generation prompt [3]; the picture takes 2 tokens.
SECOND: dict[str, Any] = {
    "messages": (user_message("and", B),),
    "message_ends": [13],
    "logical_ids": [*FIRST["logical_ids"], 21, 7, 13, IMAGE_ID, 14, 3],
    "effective_ids": [*FIRST["effective_ids"], 21, 7, 13, IMAGE_ID, IMAGE_ID, 14, 3],
    "ranges": [PlaceholderRange(3, 3), PlaceholderRange(13, 2)],
    "reply": assistant_message("8"),
    "sampled_ids": [22],
    "logprobs": [-1.5],
    "policy_version": 5,
    "finish_reason": "length",
}


def make_builder(*turns: dict[str, Any]) -> TraceBuilder:
    builder = TraceBuilder("t", (IMAGE_ID, VIDEO_ID))
    for turn in turns:
        builder.commit_turn(**turn)
    return builder


def state(builder: TraceBuilder) -> tuple[Any, ...]:
    return list(builder.nodes), builder.leaf, list(builder.logical_ids), list(builder.effective_ids)


def as_trace(builder: TraceBuilder) -> Trace:
    return make_trace(nodes=builder.nodes)


def test_tokens_along_a_branch_equal_what_the_server_saw() -> None:
    (branch,) = as_trace(make_builder(FIRST, SECOND)).branches
    assert branch.token_ids.tolist() == SECOND["effective_ids"] + SECOND["sampled_ids"]


def test_only_sampled_tokens_are_marked_and_carry_logprobs() -> None:
    (branch,) = as_trace(make_builder(FIRST, SECOND)).branches
    sampled = np.flatnonzero(branch.sampled_mask).tolist()
    assert sampled == [10, 11, 17]
    assert branch.logprobs[sampled].tolist() == [-0.5, -0.25, -1.5]
    assert branch.logprobs.sum() == -2.25


def test_pictures_keep_the_servers_ranges() -> None:
    (branch,) = as_trace(make_builder(FIRST, SECOND)).branches
    assert branch.mm_refs.slots() == [(A, 3, 3), (B, 13, 2)]
    branch.mm_refs.validate(branch.token_ids, (IMAGE_ID, VIDEO_ID), where="test")


def test_ranges_of_a_node_count_from_its_first_token() -> None:
    nodes = make_builder(FIRST, SECOND).nodes
    assert [node.ranges for node in nodes] == [
        (),
        (PlaceholderRange(1, 3),),
        (),
        (PlaceholderRange(1, 2),),
        (),
    ]
    assert [node.parent for node in nodes] == [None, 0, 1, 2, 3]


def test_the_generation_prompt_belongs_to_the_answer_and_is_not_sampled() -> None:
    reply = make_builder(FIRST).nodes[-1]
    assert reply.token_ids == (3, 21, 7)
    assert reply.mask == (False, True, True)
    assert (reply.policy_version, reply.finish_reason) == (4, "stop")


def test_a_second_attempt_shares_the_prompt_and_samples_anew() -> None:
    builder = make_builder(FIRST)
    builder.go_back()
    other: dict[str, Any] = {"sampled_ids": [23], "logprobs": [-1.0]}
    builder.commit_turn(**FIRST | other)
    first, second = as_trace(builder).branches
    assert first.node_indices == (0, 1, 2)
    assert second.node_indices == (0, 1, 3)
    assert second.token_ids.tolist() == [*FIRST["effective_ids"], 23]


def test_a_prompt_with_other_tokens_shares_only_what_is_equal() -> None:
    builder = make_builder(FIRST)
    builder.go_back()
    ids = list(FIRST["logical_ids"])
    edited: dict[str, Any] = {
        "messages": [FIRST["messages"][0], user_message("edited", *iter_images(FIRST["messages"]))]
    }
    builder.commit_turn(**FIRST | edited)
    first, second = as_trace(builder).branches
    assert first.node_indices == (0, 1, 2)
    assert second.node_indices == (0, 3, 4)
    assert second.token_ids[: len(ids)].tolist() == first.token_ids[: len(ids)].tolist()


def test_going_back_to_a_turn_extends_its_own_tokens() -> None:
    builder = make_builder(FIRST)
    position = builder.position()
    builder.commit_turn(**SECOND)
    builder.go_back(position)
    builder.commit_turn(**SECOND)
    first, second = as_trace(builder).branches
    assert first.node_indices[:-1] == second.node_indices[:-1]
    assert first.node_indices[-1] != second.node_indices[-1]
    assert len(trace_to_samples(as_trace(builder))) == 2


def test_branches_share_the_nodes_of_a_common_path() -> None:
    nodes = [make_user_node(), make_reply_node(parent=0), make_user_node(parent=1), make_user_node(parent=1)]
    assert [branch.node_indices for branch in make_trace(nodes=nodes).branches] == [(0, 1, 2), (0, 1, 3)]


def test_a_cut_off_answer_is_seen() -> None:
    assert not as_trace(make_builder(FIRST)).is_truncated
    assert as_trace(make_builder(FIRST, SECOND)).is_truncated
    assert as_trace(make_builder(FIRST, SECOND)).num_sampled_tokens == 3


WRONG_FIRST: dict[str, tuple[dict[str, Any], str]] = {
    "fewer ranges": ({"ranges": []}, r"1 pictures, the server answered 0 placeholder ranges"),
    "more ranges": ({"ranges": [PlaceholderRange(3, 2), PlaceholderRange(5, 1)]}, r"answered 2 placeholder ranges"),
    "shifted range": ({"ranges": [PlaceholderRange(4, 3)]}, r"picture 0: the server placed it at \[4, 7\).*at 3"),
    "short range": ({"ranges": [PlaceholderRange(3, 2)]}, r"after the last picture the prompt has 4 tokens.* has 5"),
    "empty range": ({"ranges": [PlaceholderRange(3, 0)]}, r"picture 0"),
    "range over text": ({"ranges": [PlaceholderRange(3, 4)]}, r"range \[3, 7\) covers tokens that are not"),
    "range behind the end": ({"ranges": [PlaceholderRange(3, 30)]}, r"ends behind the prompt's 10 tokens"),
    "not expanded": ({"effective_ids": FIRST["logical_ids"]}, r"range \[3, 6\) covers tokens that are not"),
    "changed text before": (
        {"effective_ids": [1, 99, *FIRST["effective_ids"][2:]]},
        r"token 1 of the prompt was sent as \[2\], the server used \[99\] at 1",
    ),
    "changed text after": (
        {"effective_ids": [*FIRST["effective_ids"][:8], 99, 3]},
        r"token 6 of the prompt was sent as \[12\], the server used \[99\] at 8",
    ),
    "cut off": ({"effective_ids": FIRST["effective_ids"][:-1]}, r"the prompt has 4 tokens, the server's has 3"),
    "added token": ({"effective_ids": [*FIRST["effective_ids"], 3]}, r"the prompt has 4 tokens, the server's has 5"),
    "begin token": ({"effective_ids": [0, *FIRST["effective_ids"]]}, r"token 0 of the prompt"),
    "too few logprobs": ({"logprobs": [-0.5]}, r"2 sampled tokens but 1 logprobs"),
    "picture in another message": (
        {"message_ends": [5, 7]},
        r"the system message has 0 pictures, its tokens 1 ranges",
    ),
    "picture in no message": (
        {"message_ends": [2, 3], "messages": (system_message("be brief"), user_message("which?"))},
        r"a placeholder range lies behind the last message",
    ),
    "sampled placeholder": ({"sampled_ids": [21, IMAGE_ID]}, r"the server sampled \[9\], which stand for pictures"),
}


@pytest.mark.parametrize("case", WRONG_FIRST)
def test_a_wrong_answer_is_named_and_changes_nothing(case: str) -> None:
    change, problem = WRONG_FIRST[case]
    builder = make_builder()
    before = state(builder)
    with pytest.raises(PlaceholderMismatch, match=rf"^trace t, turn 0.*{problem}"):
        builder.commit_turn(**(FIRST | change))
    assert state(builder) == before


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        # The server saw another answer than the one that was sampled in the turn before.
        (
            {
                "logical_ids": [23 if token == 21 else token for token in SECOND["logical_ids"]],
                "effective_ids": [23 if token == 21 else token for token in SECOND["effective_ids"]],
            },
            r"does not start with the 12 tokens of the turns before",
        ),
        # The picture of the first turn has another length now.
        (
            {
                "effective_ids": [*SECOND["effective_ids"][:3], IMAGE_ID, *SECOND["effective_ids"][3:]],
                "ranges": [PlaceholderRange(3, 4), PlaceholderRange(14, 2)],
            },
            r"does not start with the 12 tokens of the turns before",
        ),
        # The picture of the first turn is missing from the ranges.
        ({"ranges": [PlaceholderRange(13, 2)]}, r"has 2 pictures, the server answered 1"),
        # A conversation that was rendered anew.
        (FIRST, r"does not start with the 12 tokens of the turns before"),
    ],
)
def test_a_prompt_that_does_not_extend_its_history_is_refused(change: dict[str, Any], problem: str) -> None:
    builder = make_builder(FIRST)
    before = state(builder)
    with pytest.raises(PlaceholderMismatch, match=rf"^trace t, turn 1.*{problem}"):
        builder.commit_turn(**(SECOND | change))
    assert state(builder) == before


def test_a_turn_can_be_committed_after_a_wrong_answer() -> None:
    builder = make_builder(FIRST)
    no_ranges: dict[str, Any] = {"ranges": []}
    with pytest.raises(PlaceholderMismatch):
        builder.commit_turn(**SECOND | no_ranges)
    builder.commit_turn(**SECOND)
    assert state(builder) == state(make_builder(FIRST, SECOND))
