"""One optimizer step: micro batches in, new weights and `StepMetrics` out. Used by RL and by SFT."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from latepix.config.schema import ModelConfig, TrainStepConfig
from latepix.errors import NonFiniteLoss, TrainerError
from latepix.families.model_info import read_model_info
from latepix.families.registry import get_adapter
from latepix.trace.training import Batch, MicroBatch
from latepix.trainer.forward import ForwardOutputs, forward
from latepix.trainer.loading import checkpoint_activations, load_for_training
from latepix.trainer.loss import LossInputs, LossOutputs
from latepix.trainer.loss_choice import Loss
from latepix.trainer.materialize import Materializer, MaterializeStats, MMInputs
from latepix.trainer.optim import Optimizer


def _check_mismatch(batch: Batch, sums: dict[str, float], limit: float | None) -> None:
    kl = sums.get("loss/mismatch_kl/mean", 0.0) / batch.num_loss_tokens
    # NaN is not below either.
    if limit is not None and not kl < limit:
        raise TrainerError(
            f"Step {batch.step}: the mean mismatch KL is {kl:.3g}, wanted below {limit:g} (trainer.max_mismatch_kl): "
            "the server's logprobs are not the trainer's, although the weights are the same. The step was refused; "
            "`latepix parity` and `latepix doctor` show where they part."
        )


def count_loss_samples(micro_batch: MicroBatch) -> int:
    """Return how many samples of a micro batch have trained tokens."""
    ends = np.cumsum(micro_batch.sample_lengths, dtype=np.int64)
    trained_before = np.concatenate([[0], np.cumsum(micro_batch.loss_mask)])
    return int(np.count_nonzero(trained_before[ends] > trained_before[micro_batch.sample_starts]))


def _materialize_metrics(stats: MaterializeStats) -> dict[str, float]:
    made = max(1, stats.num_processed)
    return {
        "materialize/cache_hits/count": stats.num_hits,
        "materialize/pictures/count": stats.num_processed,
        "materialize/decode_ms/mean": 1e3 * stats.decode_s / made,
        "materialize/processor_ms/mean": 1e3 * stats.processor_s / made,
        "time/materialize_s": stats.decode_s + stats.processor_s,
        "time/wait_pixels_s": stats.wait_s,
    }


class StepMetrics(msgspec.Struct, frozen=True):
    """Scalars of one optimizer step, ready for `metrics.jsonl`."""

    values: dict[str, float]


class TrainStep:
    """The model, its optimizer and its materializer.

    Args:
        model, trainer: settings.
        loss: of a micro batch.
        total_steps: of the learning rate's schedule.
        with_reference: keep a frozen copy of the starting model, whose logprobs the loss is given.
    Raises:
        ConfigError: the model cannot be loaded, or a layout or kernel is not to be had.
    """

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainStepConfig,
        *,
        loss: Loss,
        total_steps: int,
        with_reference: bool = False,
    ) -> None:
        torch.set_num_threads(trainer.num_threads)
        self.config = trainer
        self.info = read_model_info(model.path)
        self.adapter = get_adapter(self.info.model_type)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = load_for_training(self.adapter, model, trainer, device=self.device)
        self._reference = None
        if with_reference:
            self._reference = load_for_training(self.adapter, model, trainer, device=self.device)
            self._reference.requires_grad_(False)
        if trainer.activation_checkpointing:
            checkpoint_activations(self.model)
        self.materializer = Materializer(
            self.adapter,
            self.adapter.load_processor(model.path),
            cache_bytes=trainer.image_cache_bytes,
            num_workers=trainer.image_workers,
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
        self.materializer.take_stats()
        sums: dict[str, float] = {"loss/total": 0.0}
        maxima: dict[str, float] = {}
        num_loss_samples = sum(count_loss_samples(micro_batch) for micro_batch in batch.micro_batches)
        pictures = self.materializer.run(batch.micro_batches)
        for micro_batch, mm_inputs in zip(batch.micro_batches, pictures, strict=True):
            outputs = self._forward_backward(micro_batch, mm_inputs, batch, num_loss_samples)
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
                "materialize/cached_bytes": self.materializer.cached_bytes,
                "time/train_s": seconds,
            }
            | _materialize_metrics(self.materializer.take_stats())
        )

    def measure(self, micro_batch: MicroBatch) -> ForwardOutputs:
        """Compute logprobs and entropies of a micro batch's trained tokens, without gradient; changes nothing.

        Raises:
            PlaceholderMismatch: a picture and its range do not fit.
        """
        mm_inputs = self.materializer.materialize(micro_batch)
        with torch.no_grad():
            return self._forward(self.model, micro_batch, mm_inputs)

    def _forward(self, model: PreTrainedModel, micro_batch: MicroBatch, mm_inputs: MMInputs) -> ForwardOutputs:
        return forward(
            model,
            micro_batch,
            mm_inputs,
            adapter=self.adapter,
            info=self.info,
            mm_forward_policy=self.adapter.forward_policy,
            layout=self.config.layout,
            logits_bytes=self.config.logits_bytes,
            autocast=self.config.autocast,
        )

    def _forward_backward(
        self, micro_batch: MicroBatch, mm_inputs: MMInputs, batch: Batch, num_loss_samples: int
    ) -> LossOutputs:
        outputs = self._forward(self.model, micro_batch, mm_inputs)
        trained = np.flatnonzero(micro_batch.loss_mask)
        if not len(trained):
            # Padding: the same work as the other ranks', and no gradient.
            (outputs.trainer_logprobs.sum() * 0.0).backward()
            return LossOutputs(loss=torch.zeros(()), sums={}, maxima={})
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = self._forward(self._reference, micro_batch, mm_inputs).trainer_logprobs
        sample_ids = np.repeat(np.arange(micro_batch.num_samples), micro_batch.sample_lengths)[trained]
        loss = self._loss(
            LossInputs(
                trainer_logprobs=outputs.trainer_logprobs,
                inference_logprobs=torch.from_numpy(micro_batch.inference_logprobs[trained]).to(self.device),
                advantages=torch.from_numpy(micro_batch.advantages[trained]).to(self.device),
                entropies=outputs.entropies,
                num_loss_tokens=batch.num_loss_tokens,
                sample_ids=torch.from_numpy(sample_ids).to(self.device),
                num_loss_samples=num_loss_samples,
                reference_logprobs=reference,
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
