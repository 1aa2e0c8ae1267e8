"""Pins the wire bytes of one small batch. Rebuild, only together with a new `WIRE_VERSION`:

.venv/bin/python -m tests.golden.rebuild_wire
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from latepix.trace.ingress import InlineImage
from latepix.trace.refs import MMRefs
from latepix.trace.training import Batch, TrainingSample, encode_batch, pack_samples

DIGEST_FILE = Path(__file__).with_name("wire.sha256")


def make_fixed_batch() -> Batch:
    """Build a batch from constants alone: no encoder of pictures, whose bytes change with its version."""
    pictures = [
        InlineImage(sha256=hashlib.sha256(data).hexdigest(), media_type="image/png", width=64, height=32, data=data)
        for data in (b"first picture", b"second picture")
    ]
    samples = [
        TrainingSample(
            token_ids=np.asarray([5, 9, 9, 6, 20 + number, 7], dtype=np.int32),
            loss_mask=np.asarray([False] * 4 + [True] * 2),
            inference_logprobs=np.asarray([0, 0, 0, 0, -0.5, -0.25], dtype=np.float32),
            advantages=np.asarray([0, 0, 0, 0, 1.5, 1.5], dtype=np.float32),
            mm_refs=MMRefs.from_slots([(pictures[number % 2], 1, 2)]),
            temperature=0.75,
            trace_id=f"s1-g0-r{number}",
            policy_version=number,
        )
        for number in range(3)
    ]
    micro_batches = (pack_samples(samples[:2]), pack_samples(samples[2:]))
    return Batch(step=1, micro_batches=micro_batches, num_loss_tokens=6, num_samples=3)


if __name__ == "__main__":
    data = encode_batch(make_fixed_batch())
    DIGEST_FILE.write_text(f"{hashlib.sha256(data).hexdigest()}  {len(data)} bytes\n", encoding="utf-8")
