"""The trainer's half of the canary: the next-token log-probabilities of the fixed prompts at the current weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from latepix.inference.client import Prompt
from latepix.trace.refs import MMRefs
from latepix.trace.training import TrainingSample, pack_samples
from latepix.trainer.forward import next_token_logprobs
from latepix.trainer.step import TrainStep


class Canary:
    """Computes the canary of the model it is given; its pictures are processed once.

    Args:
        train_step: holds the model.
        prompts: K prompts.
        temperature: of the run's sampling.
    """

    def __init__(self, train_step: TrainStep, prompts: Sequence[Prompt], *, temperature: float) -> None:
        self._train_step = train_step
        self._micro_batch = pack_samples([_sample(prompt, train_step, temperature) for prompt in prompts])
        self._mm_inputs = train_step.materializer.materialize(self._micro_batch)

    def logprobs(self) -> np.ndarray:
        """Return [K, V] float32, nats, under the run's temperature and ban list."""
        step = self._train_step
        with torch.no_grad():
            logprobs_KV = next_token_logprobs(
                step.model,
                self._micro_batch,
                self._mm_inputs,
                adapter=step.adapter,
                info=step.info,
                mm_forward_policy=step.adapter.forward_policy,
                layout=step.config.layout,
                autocast=step.config.autocast,
            )
        return logprobs_KV.float().cpu().numpy()


def _sample(prompt: Prompt, train_step: TrainStep, temperature: float) -> TrainingSample:
    token_ids, ranges = train_step.info.expand(prompt.token_ids, prompt.images)
    slots = [(image, placed.offset, placed.length) for image, placed in zip(prompt.images, ranges, strict=True)]
    zeros = np.zeros(len(token_ids), dtype=np.float32)
    return TrainingSample(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        loss_mask=np.zeros(len(token_ids), dtype=bool),
        inference_logprobs=zeros,
        advantages=zeros,
        mm_refs=MMRefs.from_slots(slots),
        temperature=temperature,
        trace_id="canary",
    )
