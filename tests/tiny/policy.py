"""A tiny policy with opinions, and samples and requests for it.

A freshly made tiny model gives nearly uniform logits, under which almost any mistake passes an equality test.
`sharpen` scales its weights until its answers are peaked and depend on the pictures.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from latepix.families.base import Adapter
from latepix.families.model_info import ModelInfo, read_model_info
from latepix.families.registry import get_adapter
from latepix.inference.contract import GenerateRequest, SamplingParams, image_part
from latepix.trace.ingress import InlineImage
from latepix.trace.refs import MMRefs
from latepix.trace.training import TrainingSample, pack_samples
from latepix.trainer.forward import ForwardOutputs, forward
from latepix.trainer.materialize import materialize_mm_refs
from tests.tiny.pictures import make_image

T = TypeVar("T")
#: What `sharpen` multiplies matrices with. A recurrent layer feeds its own rounding errors back: it gets less.
_FACTORS = (("embed_tokens", 20.0), ("lm_head", 20.0), ("linear_attn", 3.0), ("", 6.0))
#: A number of random text tokens, or a picture.
Part: TypeAlias = "int | InlineImage"


class Policy(msgspec.Struct, frozen=True):
    """A loaded model folder, as the trainer holds it."""

    path: Path
    info: ModelInfo
    adapter: Adapter
    processor: Any
    model: PreTrainedModel


def sharpen(source: Path, out: Path, *, seed: int = 0) -> Path:
    """Write a copy of a tiny model whose logits are peaked and whose norms and biases are not trivial."""
    shutil.copytree(source, out)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(out / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            tensors[name] = tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        else:
            tensors[name] = tensor * next(factor for part, factor in _FACTORS if part in name)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def load_policy(path: Path, *, dtype: torch.dtype = torch.float32) -> Policy:
    """Load a model folder through its family's adapter."""
    info = read_model_info(path)
    adapter = get_adapter(info.model_type)
    return Policy(
        path=path,
        info=info,
        adapter=adapter,
        processor=adapter.load_processor(path),
        model=adapter.load_model(path, dtype=dtype, device="cpu"),
    )


def draw(width: int, height: int, *, seed: int) -> InlineImage:
    """Draw a picture of random pixels; sides that are multiples of 32 are left alone by the processor."""
    return make_image(width=width, height=height, seed=seed)


def text_ids(info: ModelInfo, count: int, rng: np.random.Generator) -> list[int]:
    """Return random ids that are neither special nor banned."""
    allowed = np.setdiff1d(np.arange(info.vocab_size), [*info.banned_ids, *info.stop_ids])
    return rng.choice(allowed, size=count).tolist()


def make_sample(
    info: ModelInfo,
    *parts: Part,
    answer: int = 3,
    seed: int = 0,
    temperature: float = 1.0,
    advantage: float = 1.0,
    trace_id: str = "",
) -> TrainingSample:
    """Build a sample: prompt parts, then `answer` trained tokens (0 for none)."""
    rng = np.random.default_rng([seed, 7])
    ids: list[int] = []
    slots: list[tuple[InlineImage, int, int]] = []
    for part in parts:
        if isinstance(part, int):
            ids += text_ids(info, part, rng)
        else:
            length = info.num_image_tokens(part)
            slots.append((part, len(ids), length))
            ids += [info.image_placeholder_id] * length
    ids += text_ids(info, answer, rng)
    mask = np.arange(len(ids)) >= len(ids) - answer
    return TrainingSample(
        token_ids=np.asarray(ids, dtype=np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, np.float32(-1.0), np.float32(0)),
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        mm_refs=MMRefs.from_slots(slots),
        temperature=temperature,
        trace_id=trace_id or f"trace-{seed}",
    )


def make_request(info: ModelInfo, *parts: Part, seed: int = 0, **sampling: Any) -> GenerateRequest:
    """Build a request with a logical prompt: one placeholder for each picture among the parts.

    `seed` is of the prompt's text; a seed for sampling is given as `sampling_seed`.
    """
    rng = np.random.default_rng([seed, 11])
    ids: list[int] = []
    for part in parts:
        ids += text_ids(info, part, rng) if isinstance(part, int) else [info.image_placeholder_id]
    if "sampling_seed" in sampling:
        sampling["seed"] = sampling.pop("sampling_seed")
    return GenerateRequest(
        token_ids=ids,
        content_parts=[image_part(part.url) for part in parts if not isinstance(part, int)],
        sampling_params=SamplingParams(**sampling),
    )


def score(policy: Policy, samples: Sequence[TrainingSample], **how: Any) -> ForwardOutputs:
    """Run the trainer's forward over samples packed into one micro batch; `how` goes to `forward`."""
    return run_forward(forward, policy, samples, **how)


def run_forward(function: Callable[..., T], policy: Policy, samples: Sequence[TrainingSample], **how: Any) -> T:
    """Call a function with the arguments of `forward` on samples packed into one micro batch."""
    micro_batch = pack_samples(samples)
    return function(
        policy.model,
        micro_batch,
        materialize_mm_refs(micro_batch.mm_refs, policy.adapter, policy.processor),
        adapter=policy.adapter,
        info=policy.info,
        mm_forward_policy=policy.adapter.forward_policy,
        **how,
    )


def gradients(policy: Policy, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradient of every parameter that has one, and clear them."""
    policy.model.zero_grad(set_to_none=True)
    loss.backward()
    found = {
        name: parameter.grad.clone()
        for name, parameter in policy.model.named_parameters()
        if parameter.grad is not None
    }
    policy.model.zero_grad(set_to_none=True)
    return found


def assert_same_gradients(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, rtol: float) -> None:
    """Compare gradients, each against the size of its own largest entry."""
    assert one.keys() == other.keys()
    assert len(one) > 40, "hardly any parameter has a gradient"
    for name, gradient in one.items():
        largest = float(gradient.abs().max())
        assert float((gradient - other[name]).abs().max()) <= rtol * largest + 1e-9, name
