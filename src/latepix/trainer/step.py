"""One optimizer step: micro batches in, new weights and `StepMetrics` out. Used by RL and by SFT."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from latepix.config.schema import LossConfig, ModelConfig, TrainStepConfig
from latepix.errors import NonFiniteLoss, TrainerError
from latepix.families.base import torch_dtype
from latepix.families.model_info import read_model_info
from latepix.families.registry import get_adapter
from latepix.trace.training import Batch, MicroBatch
from latepix.trainer.forward import ForwardOutputs, forward
from latepix.trainer.loss import LossInputs, LossOutputs, trust_region_policy_gradient
from latepix.trainer.materialize import Materializer, MMInputs
from latepix.trainer.optim import Optimizer

Loss = Callable[[LossInputs], LossOutputs]


def policy_gradient_of(config: LossConfig) -> Loss:
    """Return the policy gradient with a run's settings."""
    return functools.partial(trust_region_policy_gradient, **config.model_dump())


def _check_mismatch(batch: Batch, sums: dict[str, float], limit: float | None) -> None:
    kl = sums.get("loss/mismatch_kl/mean", 0.0) / batch.num_loss_tokens
    # NaN is not below either.
    if limit is not None and not kl < limit:
        raise TrainerError(
            f"Step {batch.step}: the mean mismatch KL is {kl:.3g}, wanted below {limit:g} (trainer.max_mismatch_kl): "
            "the server's logprobs are not the trainer's, although the weights are the same. The step was refused; "
            "`latepix parity` and `latepix doctor` show where they part."
        )


class StepMetrics(msgspec.Struct, frozen=True):
    """Scalars of one optimizer step, ready for `metrics.jsonl`."""

    values: dict[str, float]


class TrainStep:
    """The model, its optimizer and its materializer.

    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(self, model: ModelConfig, trainer: TrainStepConfig, *, loss: Loss, total_steps: int) -> None:
        torch.set_num_threads(trainer.num_threads)
        self.config = trainer
        self.info = read_model_info(model.path)
        self.adapter = get_adapter(self.info.model_type)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = self.adapter.load_model(model.path, dtype=torch_dtype(model.dtype), device=self.device)
        self.materializer = Materializer(
            self.adapter, self.adapter.load_processor(model.path), cache_bytes=trainer.image_cache_bytes
        )
        self._optimizer = Optimizer(self.model, trainer.optim, total_steps=total_steps)
        self._loss = loss

    @property
    def source(self) -> Path:
        """The folder the model was loaded from."""
        return self.info.path

    def run(self, batch: Batch, *, max_mismatch_kl: float | None = None) -> StepMetrics:
        """Train on one batch.

        A batch without trained tokens changes nothing and says so (`train/skipped`).

        Args:
            batch: one optimizer step's data.
            max_mismatch_kl: a mean mismatch KL that is not below it refuses the step, nats; None lets all pass.
        Raises:
            TrainerError: the server's logprobs are not the trainer's; the weights are unchanged.
            NonFiniteLoss: loss or gradient is NaN or infinite; the weights are unchanged.
            PlaceholderMismatch: a picture and its range do not fit.
        """
        if batch.num_loss_tokens == 0:
            return StepMetrics(values={"train/skipped": 1.0})
        self._optimizer.clear()
        started = time.monotonic()
        processed, busy = self.materializer.num_processed, self.materializer.busy_s
        hits = self.materializer.num_hits
        sums: dict[str, float] = {"loss/total": 0.0}
        maxima: dict[str, float] = {}
        waited = 0.0
        ahead = self.materializer.submit(batch.micro_batches[0].mm_refs)
        for number, micro_batch in enumerate(batch.micro_batches):
            wait_started = time.monotonic()
            mm_inputs = ahead.result()
            waited += time.monotonic() - wait_started
            if number + 1 < len(batch.micro_batches):
                ahead = self.materializer.submit(batch.micro_batches[number + 1].mm_refs)
            outputs = self._forward_backward(micro_batch, mm_inputs, batch)
            sums["loss/total"] += float(outputs.loss.detach()) * batch.num_loss_tokens
            for key, value in outputs.sums.items():
                sums[key] = sums.get(key, 0.0) + value
            for key, value in outputs.maxima.items():
                maxima[key] = max(maxima.get(key, -np.inf), value)
        _check_mismatch(batch, sums, max_mismatch_kl)
        optim = self._optimizer.step(batch.step)
        seconds = time.monotonic() - started
        num_tokens = sum(len(micro_batch.token_ids) for micro_batch in batch.micro_batches)
        return StepMetrics(
            values={key: value / batch.num_loss_tokens for key, value in sums.items()}
            | maxima
            | optim
            | {
                "train/tokens/sum": num_tokens,
                "train/loss_tokens/sum": batch.num_loss_tokens,
                "perf/tokens_per_s": num_tokens / seconds,
                "materialize/cache_hits/count": self.materializer.num_hits - hits,
                "materialize/pictures/count": self.materializer.num_processed - processed,
                "time/materialize_s": self.materializer.busy_s - busy,
                "time/wait_pixels_s": waited,
                "time/train_s": seconds,
            }
        )

    def measure(self, micro_batch: MicroBatch) -> ForwardOutputs:
        """Compute logprobs and entropies of a micro batch's trained tokens, without gradient; changes nothing.

        Raises:
            PlaceholderMismatch: a picture and its range do not fit.
        """
        mm_inputs = self.materializer.submit(micro_batch.mm_refs).result()
        with torch.no_grad():
            return self._forward(micro_batch, mm_inputs)

    def _forward(self, micro_batch: MicroBatch, mm_inputs: MMInputs) -> ForwardOutputs:
        return forward(
            self.model,
            micro_batch,
            mm_inputs,
            adapter=self.adapter,
            info=self.info,
            mm_forward_policy=self.adapter.forward_policy,
            layout=self.config.layout,
            chunk_tokens=self.config.logprob_chunk_tokens,
        )

    def _forward_backward(self, micro_batch: MicroBatch, mm_inputs: MMInputs, batch: Batch) -> LossOutputs:
        outputs = self._forward(micro_batch, mm_inputs)
        trained = np.flatnonzero(micro_batch.loss_mask)
        if not len(trained):
            # Padding: the same work as the other ranks', and no gradient.
            (outputs.trainer_logprobs.sum() * 0.0).backward()
            return LossOutputs(loss=torch.zeros(()), sums={}, maxima={})
        loss = self._loss(
            LossInputs(
                trainer_logprobs=outputs.trainer_logprobs,
                inference_logprobs=torch.from_numpy(micro_batch.inference_logprobs[trained]).to(self.device),
                advantages=torch.from_numpy(micro_batch.advantages[trained]).to(self.device),
                entropies=outputs.entropies,
                num_loss_tokens=batch.num_loss_tokens,
            )
        )
        if not torch.isfinite(loss.loss):
            raise NonFiniteLoss(
                f"Step {batch.step}: the loss is {float(loss.loss.detach())} in a micro batch of traces "
                f"{', '.join(micro_batch.trace_ids[:4])}... The step was refused and its batch kept for a closer look."
            )
        loss.loss.backward()
        return loss

    def close(self) -> None:
        """End the background threads."""
        self.materializer.close()
