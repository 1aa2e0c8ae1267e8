"""Traces -> training samples: one per branch, each sampled node trained once."""

from __future__ import annotations

import numpy as np

from latepix.trace.graph import Trace
from latepix.trace.training import TrainingSample


def trace_to_samples(trace: Trace, *, temperature: float = 1.0) -> list[TrainingSample]:
    """Cut a scored trace into training samples.

    A node that several branches share is trained in the first of them; in the others its tokens are context. A branch
    with nothing left to train gives no sample.

    Args:
        trace: with an `advantage`, or without one for supervised samples (every trained token then weighs 1).
        temperature: the sampling temperature of the rollout.
    Returns:
        Samples in the order of the branches; none for a rollout that failed.
    """
    if trace.failure is not None:
        return []
    advantage = 1.0 if trace.advantage is None else trace.advantage
    samples = []
    trained: set[int] = set()
    for number, branch in enumerate(trace.branches):
        loss_mask = branch.sampled_mask.copy()
        starts = branch.node_starts
        for start, end, index in zip(starts[:-1], starts[1:], branch.node_indices, strict=True):
            if index in trained:
                loss_mask[start:end] = False
        trained.update(branch.node_indices)
        if len(loss_mask):
            loss_mask[0] = False
        if not loss_mask.any():
            continue
        versions = [node.policy_version for node in branch.nodes if node.policy_version is not None]
        samples.append(
            TrainingSample(
                token_ids=branch.token_ids,
                loss_mask=loss_mask,
                inference_logprobs=np.where(loss_mask, branch.logprobs, np.float32(0)),
                advantages=np.where(loss_mask, np.float32(advantage), np.float32(0)),
                mm_refs=branch.mm_refs,
                temperature=temperature,
                trace_id=trace.id,
                branch=number,
                group_id=trace.group_id,
                policy_version=min(versions, default=-1),
            )
        )
    return samples
