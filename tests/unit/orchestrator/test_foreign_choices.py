"""Which traces of `verifiers` are trained, with which advantages, and the example of the docs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from latepix.errors import RolloutError
from latepix.families.model_info import ModelInfo, read_model_info
from latepix.orchestrator.samples import trace_to_samples
from latepix.trace.graph import MessageNode
from latepix.trace.messages import ImagePart
from tests.tiny.foreign import CONVERSATIONS, A, foreign_message, foreign_trace, with_pictures
from tests.tiny.traces import make_info, make_reply_node, make_trace, make_user_node

INFO = make_info()
DOCS = Path(__file__).parents[3] / "docs" / "traces.md"


@pytest.mark.parametrize(
    "fields", [{"ok": False}, {"ok": False, "is_completed": False}, {"trainable": False}], ids=["error", "cut", "judge"]
)
def test_a_trace_that_is_not_trained_gives_no_sample(vf: Any, fields: dict[str, Any]) -> None:
    nodes = CONVERSATIONS["one picture"]
    assert len(trace_to_samples(foreign_trace(vf, nodes), info=INFO)) == 1
    assert trace_to_samples(foreign_trace(vf, nodes, **fields)) == []


def test_an_error_that_was_recorded_gives_no_sample(vf: Any) -> None:
    trace = foreign_trace(vf, CONVERSATIONS["one picture"])
    trace.record_error(RuntimeError("boom"))
    assert trace_to_samples(trace) == []


def test_a_relayed_trace_without_tokens_gives_no_sample(vf: Any) -> None:
    asked = vf.MessageNode(message=foreign_message(vf, with_pictures(A).message))
    said = vf.MessageNode(parent=0, message=vf.AssistantMessage(content="x"), sampled=True)
    assert trace_to_samples(foreign_trace(vf, [asked, said])) == []


def test_a_branch_that_is_not_trained_leaves_shared_nodes_to_the_others(vf: Any) -> None:
    from verifiers.v1.semantic import ParentLink

    trace = foreign_trace(vf, CONVERSATIONS["a shared prefix"])
    trace.nodes[3].semantic_parents = [ParentLink(node=1, type="compaction_attempt")]
    assert [branch.trainable for branch in trace.branches] == [False, True, True]
    first, second = trace_to_samples(trace, info=INFO)
    assert (first.branch, second.branch) == (1, 2)
    assert first.loss_mask.sum() == 4
    assert second.loss_mask.sum() == 2


def test_advantages_come_from_the_argument_then_the_nodes_then_the_trace(vf: Any) -> None:
    nodes = [make_user_node(), make_reply_node(parent=0), make_user_node(parent=1), make_reply_node(parent=2)]
    trace = foreign_trace(vf, nodes)

    def trained(**options: Any) -> list[float]:
        (sample,) = trace_to_samples(trace, **options)
        assert not sample.advantages[~sample.loss_mask].any()
        return sample.advantages[sample.loss_mask].tolist()

    assert trained() == [1.0] * 4
    trace.nodes[1].advantages = [0.5, -2.0]
    assert trained() == [0.5, -2.0, 0.0, 0.0]
    assert trained(advantage=-1.0) == [-1.0] * 4


def test_an_advantage_of_the_trace_is_read() -> None:
    node = SimpleNamespace(parent=None, message={"role": "user"}, token_ids=[1, 2], mask=[False, True], logprobs=[-1.0])
    trace = SimpleNamespace(id="t", nodes=[node], branches=[SimpleNamespace(nodes=[node])], advantage=-3.0)
    assert trace_to_samples(trace)[0].advantages.tolist() == [0.0, -3.0]


def test_an_advantage_must_be_finite() -> None:
    with pytest.raises(RolloutError, match="trace s0-g0-r0: advantage = nan"):
        trace_to_samples(make_trace(), advantage=float("nan"))


def test_the_argument_replaces_the_advantage_and_temperature_of_our_own_trace() -> None:
    trace = msgspec.structs.replace(make_trace(advantage=0.5), temperature=0.6)
    (as_it_is,) = trace_to_samples(trace)
    assert (as_it_is.advantages.max(), as_it_is.temperature) == (0.5, 0.6)
    (sample,) = trace_to_samples(trace, advantage=4.0, temperature=0.9)
    assert (sample.advantages.max(), sample.temperature) == (4.0, 0.9)


def test_the_example_of_the_docs_is_how_pictures_come_in(vf: Any, tiny_model: Path) -> None:
    (code,) = [block for block in code_blocks("python") if "def batch_of" in block]
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    info = read_model_info(tiny_model)
    nodes = [with_model_ids(node, info) for node in CONVERSATIONS["several pictures"]]
    traces = [foreign_trace(vf, nodes, id="a"), foreign_trace(vf, nodes, id="b")]
    (batch,) = namespace["batch_of"](traces, [1.0, -1.0], model_folder=tiny_model, temperature=0.8)
    (micro_batch,) = batch.micro_batches
    assert sorted(micro_batch.trace_ids) == ["a", "b"]
    assert len(micro_batch.mm_refs.refs) == 6
    assert len(micro_batch.mm_refs.images) == 3
    assert micro_batch.temperatures.tolist() == pytest.approx([0.8, 0.8])


def with_model_ids(node: MessageNode, info: ModelInfo) -> MessageNode:
    """Write a node's pictures with the placeholders of a real model, in their number."""
    token_ids: list[int] = []
    at = 0
    images = [part.image for part in node.message.content if isinstance(part, ImagePart)]
    for image, placed in zip(images, node.ranges, strict=True):
        token_ids += node.token_ids[at : placed.offset] + (info.image_placeholder_id,) * info.num_image_tokens(image)
        at = placed.offset + placed.length
    token_ids += node.token_ids[at:]
    mask = (False,) * (len(token_ids) - sum(node.mask)) + (True,) * sum(node.mask)
    return msgspec.structs.replace(node, token_ids=tuple(token_ids), mask=mask, ranges=())


def code_blocks(language: str) -> list[str]:
    """Return the code blocks of `docs/traces.md` in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
