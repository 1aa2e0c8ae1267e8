"""latepix trains vision-language models with reinforcement learning, straight from inline image rollouts.

Everything here can be used inside somebody else's trainer, without our loop. Names that need torch are imported when
they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from latepix import torchvision_stubs
from latepix.families.registry import get_adapter
from latepix.orchestrator.batch import prepare_batch
from latepix.orchestrator.samples import trace_to_samples
from latepix.trace.graph import Trace
from latepix.trace.ingress import GridFit, ImageAccess, ImageLimits, InlineImage, ingest_image
from latepix.trace.refs import ImageRef, MMRefs
from latepix.trace.store import read_traces
from latepix.trace.training import MicroBatch, TrainingSample

if TYPE_CHECKING:
    from latepix.trainer.materialize import materialize_mm_refs

# Hugging Face imports torchvision wherever it is installed, so this comes before anything imports transformers.
torchvision_stubs.install()

__version__ = "0.1.0"
__all__ = [
    "GridFit",
    "ImageAccess",
    "ImageLimits",
    "ImageRef",
    "InlineImage",
    "MMRefs",
    "MicroBatch",
    "Trace",
    "TrainingSample",
    "get_adapter",
    "ingest_image",
    "materialize_mm_refs",
    "prepare_batch",
    "read_traces",
    "trace_to_samples",
]


def __getattr__(name: str) -> Any:
    if name == "materialize_mm_refs":
        return importlib.import_module("latepix.trainer.materialize").materialize_mm_refs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
