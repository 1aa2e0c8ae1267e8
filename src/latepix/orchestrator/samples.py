"""Traces -> training samples: one per branch, each sampled node trained once."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from latepix.errors import RolloutError
from latepix.families.model_info import ModelInfo
from latepix.orchestrator.foreign import ForeignBranch, ForeignTrace, Ingest, foreign_branches
from latepix.trace.graph import Branch, Trace
from latepix.trace.training import TrainingSample


def trace_to_samples(
    trace: Trace | ForeignTrace,
    *,
    temperature: float | None = None,
    advantage: float | None = None,
    info: ModelInfo | None = None,
    ingest: Ingest | None = None,
) -> list[TrainingSample]:
    """Cut a scored trace into training samples.

    A node that several branches share is trained in the first of them; in the others its tokens are context. A branch
    with nothing left to train gives no sample, and its pictures are not looked at.

    Args:
        trace: our own, or one of `verifiers` v1 (any object read like it: `orchestrator/foreign.py`). Without an
            advantage its samples are supervised: every trained token weighs 1.
        temperature: the rollout was sampled at, and its logprobs are of; None takes that of the trace, or 1.
        advantage: of every trained token; None takes the advantages of the trace (a foreign trace's nodes come first).
        info: facts of the model that sampled, for a foreign trace with pictures: which tokens stand for them, and how
            many each takes. Our own traces say it themselves.
        ingest: how a content part of a foreign trace becomes a picture; None is `ingest_image` with its defaults.
            Without `fit`: the server saw the pictures as they are.
    Returns:
        Samples in the order of the branches; none for a rollout that failed or did not finish.
    Raises:
        PlaceholderMismatch: arrays, pictures and placeholder tokens of a foreign trace do not fit each other.
        ImageError: ingress refuses a picture of a foreign trace.
        ConfigError: a foreign trace has pictures, and `info` is None.
        RolloutError: an advantage or a logprob is NaN or infinite.
    """
    if advantage is not None and not math.isfinite(advantage):
        raise RolloutError(f"trace {trace.id}: advantage = {advantage}; wanted a finite number.")
    branches: Iterable[tuple[int, Branch | ForeignBranch]]
    if isinstance(trace, Trace):
        branches = enumerate(trace.branches if trace.failure is None else ())
    else:
        branches = foreign_branches(trace, info=info, ingest=ingest)
    if temperature is None:
        temperature = getattr(trace, "temperature", 1.0)
    samples = []
    trained: set[int] = set()
    for number, branch in branches:
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
        versions = [getattr(node, "policy_version", None) for node in branch.nodes]
        samples.append(
            TrainingSample(
                token_ids=branch.token_ids,
                loss_mask=loss_mask,
                inference_logprobs=np.where(loss_mask, branch.logprobs, np.float32(0)),
                advantages=np.where(loss_mask, _weights(trace, branch, advantage), np.float32(0)),
                mm_refs=branch.mm_refs,
                temperature=temperature,
                trace_id=trace.id,
                branch=number,
                group_id=getattr(trace, "group_id", 0),
                policy_version=min((version for version in versions if version is not None), default=-1),
            )
        )
    return samples


def _weights(
    trace: Trace | ForeignTrace, branch: Branch | ForeignBranch, advantage: float | None
) -> np.float32 | np.ndarray:
    """Return what the trained tokens weigh: one number, or [T] float32."""
    if advantage is None and isinstance(branch, ForeignBranch) and branch.advantages is not None:
        return branch.advantages
    if advantage is None:
        advantage = getattr(trace, "advantage", None)
    return np.float32(1.0 if advantage is None else advantage)
