"""The trainer process: wait for a batch, step, publish weights."""

from __future__ import annotations

import functools
import time

from latepix.config.schema import RunConfig
from latepix.errors import StaleWeights
from latepix.metrics import MetricsWriter, peak_rss_bytes
from latepix.trace.training import Batch
from latepix.trainer.checkpoint import export_model, write_weights
from latepix.trainer.loss import trust_region_policy_gradient
from latepix.trainer.step import TrainStep
from latepix.transport.rollouts import BatchFolder
from latepix.transport.weights import WeightsFolder


def run_trainer(config: RunConfig) -> None:
    """Run the trainer process to its end: all steps, then the final model in `model/` of the run folder.

    Raises:
        ConfigError: the run folder holds another run's weights.
    """
    weights = WeightsFolder(config.output_dir)
    weights.check_unused()
    loss = functools.partial(
        trust_region_policy_gradient,
        max_prob_increase=config.trainer.loss.max_prob_increase,
        max_prob_decrease=config.trainer.loss.max_prob_decrease,
        log_ratio_penalty=config.trainer.loss.log_ratio_penalty,
        entropy_bonus=config.trainer.loss.entropy_bonus,
    )
    train_step = TrainStep(config.model, config.trainer, loss=loss, total_steps=config.steps)
    batches = BatchFolder(config.output_dir)
    metrics = MetricsWriter(config.output_dir / "metrics.jsonl")
    try:
        for step in range(config.steps):
            _one_step(step, config, train_step, batches, weights, metrics)
        export_model(train_step.source, config.output_dir / "model", train_step.model, train_step.adapter)
    finally:
        train_step.close()
        metrics.close()


def _one_step(
    step: int,
    config: RunConfig,
    train_step: TrainStep,
    batches: BatchFolder,
    weights: WeightsFolder,
    metrics: MetricsWriter,
) -> None:
    started = time.monotonic()
    batch = batches.receive(step, timeout_s=config.trainer.wait_timeout_s)
    _check_versions(batch, config.orchestrator.max_off_policy_steps)
    received = time.monotonic()
    step_metrics = train_step.run(batch)
    trained = time.monotonic()
    weights.publish(step + 1, lambda folder: write_weights(folder, train_step.model, train_step.adapter))
    published = time.monotonic()
    # A batch of this step was sampled from these weights or newer ones; nobody asks for older ones again.
    weights.prune(keep_from=step - config.orchestrator.max_off_policy_steps)
    batches.done(step)
    metrics.write(
        step,
        step_metrics.values
        | {
            "time/wait_batch_s": received - started,
            "time/publish_s": published - trained,
            "process/trainer/peak_rss_bytes": peak_rss_bytes(),
        },
    )


def _check_versions(batch: Batch, max_off_policy_steps: int) -> None:
    """Refuse samples of weights that are too old, or newer than any this run has published (-1: not known).

    Raises:
        StaleWeights: names the first such sample.
    """
    oldest = batch.step - max_off_policy_steps
    for micro_batch in batch.micro_batches:
        for trace_id, version in zip(micro_batch.trace_ids, micro_batch.policy_versions.tolist(), strict=True):
            if version >= 0 and not oldest <= version <= batch.step:
                raise StaleWeights(
                    f"Step {batch.step}, trace {trace_id}: sampled by policy version {version}, wanted "
                    f"{max(0, oldest)} to {batch.step} (orchestrator.max_off_policy_steps = {max_off_policy_steps}). "
                    "The server was restarted, or serves the weights of another run; start server and run anew."
                )
