"""Random traces for property tests, and batches cut back into their samples."""

from __future__ import annotations

import os

from hypothesis import strategies as st

from latepix.trace.graph import MessageNode, Trace
from latepix.trace.refs import MMRefs
from latepix.trace.training import Batch, TrainingSample
from tests.tiny.pictures import make_image
from tests.tiny.traces import make_reply_node, make_trace, make_user_node

#: Cases of a property test; `make properties` asks for 10,000.
NUM_CASES = int(os.environ.get("LATEPIX_PROPERTY_CASES", "200"))

#: A few pictures, some alike in size; drawn pictures repeat, within a sample and between samples.
POOL = [
    make_image(width=32 * wide, height=32 * high, seed=seed)
    for seed, (wide, high) in enumerate([(1, 1), (1, 1), (2, 1), (3, 2), (4, 3)])
]


@st.composite
def random_traces(draw: st.DrawFn) -> list[Trace]:
    """Draw conversations of several turns with pictures, some of which branch; a few groups."""
    traces = []
    for number in range(draw(st.integers(1, 6))):
        nodes: list[MessageNode] = []
        leaf: int | None = None
        for _ in range(draw(st.integers(1, 4))):
            # A new turn hangs below the last one, or starts a branch: at a turn before, or at the root.
            answers = [index for index, node in enumerate(nodes) if node.logprobs]
            if nodes and draw(st.booleans()):
                leaf = draw(st.sampled_from([None, *answers]))
            images = draw(st.lists(st.sampled_from(POOL), max_size=3))
            text_ids = draw(st.lists(st.integers(11, 50), max_size=5))
            nodes.append(make_user_node(parent=leaf, images=images, text_ids=text_ids))
            sampled_ids = draw(st.lists(st.integers(11, 50), min_size=1, max_size=6))
            logprobs = draw(st.lists(st.floats(-20, 0, width=32), min_size=len(sampled_ids), max_size=len(sampled_ids)))
            version = draw(st.integers(0, 3))
            nodes.append(
                make_reply_node(
                    parent=len(nodes) - 1, sampled_ids=sampled_ids, logprobs=logprobs, policy_version=version
                )
            )
            leaf = len(nodes) - 1
        traces.append(
            make_trace(
                nodes=nodes,
                trace_id=f"t{number}",
                group_id=draw(st.integers(0, 2)),
                advantage=draw(st.floats(-2, 2, width=32)),
            )
        )
    return traces


def unpack(batch: Batch) -> list[TrainingSample]:
    """Cut a batch back into its samples."""
    samples = []
    for micro_batch in batch.micro_batches:
        for index, (start, length) in enumerate(
            zip(micro_batch.sample_starts.tolist(), micro_batch.sample_lengths.tolist(), strict=True)
        ):
            inside = slice(start, start + length)
            slots = [slot for slot in micro_batch.mm_refs.slots(-start) if 0 <= slot[1] < length]
            samples.append(
                TrainingSample(
                    token_ids=micro_batch.token_ids[inside],
                    loss_mask=micro_batch.loss_mask[inside],
                    inference_logprobs=micro_batch.inference_logprobs[inside],
                    advantages=micro_batch.advantages[inside],
                    mm_refs=MMRefs.from_slots(slots),
                    temperature=float(micro_batch.temperatures[index]),
                    trace_id=micro_batch.trace_ids[index],
                    policy_version=int(micro_batch.policy_versions[index]),
                )
            )
    return samples


def content(sample: TrainingSample) -> tuple[object, ...]:
    """Everything of a sample that the trainer reads, comparable."""
    return (
        sample.trace_id,
        sample.token_ids.tolist(),
        sample.loss_mask.tolist(),
        sample.inference_logprobs.tolist(),
        sample.advantages.tolist(),
        sample.mm_refs,
        sample.temperature,
        sample.policy_version,
    )
