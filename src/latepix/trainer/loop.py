"""The trainer process: say how it is set up, then wait for a batch, step, publish weights with their canary."""

from __future__ import annotations

import time
from collections.abc import Callable

from latepix.config.schema import RunConfig
from latepix.errors import NonFiniteLoss, StaleWeights
from latepix.families.facts import local_facts
from latepix.inference.canary import prompts_of, prompts_sha256
from latepix.inference.render import MessageRenderer
from latepix.metrics import MetricsWriter, peak_rss_bytes
from latepix.trace.training import Batch
from latepix.trainer.canary import Canary
from latepix.trainer.checkpoint import export_model, write_weights
from latepix.trainer.loss_choice import loss_of
from latepix.trainer.nccl import NcclSender
from latepix.trainer.step import StepMetrics, TrainStep
from latepix.transport.handshake import HandshakeFolder
from latepix.transport.rollouts import BatchFolder
from latepix.transport.weights import WeightsFolder


def run_trainer(config: RunConfig) -> None:
    """Run the trainer process to its end: all steps, then the final model in `model/` of the run folder.

    Raises:
        ConfigError: the run folder holds another run's weights.
    """
    weights = WeightsFolder(config.output_dir)
    weights.check_unused()
    HandshakeFolder(config.output_dir).clear()
    train_step = rl_train_step(config, total_steps=config.steps)
    batches = BatchFolder(config.output_dir)
    metrics = MetricsWriter(config.output_dir / "metrics.jsonl")
    publisher = _Publisher(config, train_step, weights)
    try:
        publisher.greet()
        for step in range(config.steps):
            _one_step(step, config, train_step, batches, publisher, metrics)
        export_model(train_step.source, config.output_dir / "model", train_step.model, train_step.adapter)
    finally:
        train_step.close()
        metrics.close()


def rl_train_step(config: RunConfig, *, total_steps: int) -> TrainStep:
    """Return the model, optimizer and loss of an `rl` run.

    Raises:
        ConfigError: the model cannot be loaded, a kernel is missing, or the loss cannot be imported.
    """
    loss = config.trainer.loss
    return TrainStep(
        config.model,
        config.trainer,
        loss=loss_of(loss),
        total_steps=total_steps,
        with_reference=loss.kl_weight > 0,
    )


class _Publisher:
    """Shows weights, and the canary that proves which ones a server serves."""

    def __init__(self, config: RunConfig, train_step: TrainStep, weights: WeightsFolder) -> None:
        self._config = config
        self._train_step = train_step
        self._weights = weights
        self._handshake = HandshakeFolder(config.output_dir)
        prompts = prompts_of(config, MessageRenderer(train_step.info))
        self._prompts_sha256 = prompts_sha256(prompts)
        self._canary = Canary(train_step, prompts, temperature=config.sampling.temperature)
        self._broadcast: Callable[[int], None] | None = None
        if config.inference.weight_update == "nccl":
            self._broadcast = NcclSender(train_step.model, train_step.adapter, config.inference.base_url).send

    def greet(self) -> None:
        """Say how this trainer is set up, and what its starting weights answer."""
        self._handshake.publish_canary(0, self._canary.logprobs())
        model = self._config.model
        self._handshake.publish_facts(
            local_facts(model.path, engine="trainer", dtype=model.dtype, canary_sha256=self._prompts_sha256)
        )

    def publish(self, policy_version: int) -> None:
        """Show the current weights as a version; whoever sees it finds its canary."""
        step = self._train_step
        self._handshake.publish_canary(policy_version, self._canary.logprobs())
        if self._broadcast is not None:
            self._broadcast(policy_version)
            self._weights.publish(policy_version, lambda folder: None)
            return
        self._weights.publish(policy_version, lambda folder: write_weights(folder, step.model, step.adapter))

    def prune(self, *, keep_from: int) -> None:
        """Remove what nobody asks for any more."""
        self._weights.prune(keep_from=keep_from)
        self._handshake.prune(keep_from=keep_from)


def _one_step(
    step: int,
    config: RunConfig,
    train_step: TrainStep,
    batches: BatchFolder,
    publisher: _Publisher,
    metrics: MetricsWriter,
) -> None:
    started = time.monotonic()
    batch = batches.receive(step, timeout_s=config.trainer.wait_timeout_s)
    _check_versions(batch, config.orchestrator.max_off_policy_steps)
    received = time.monotonic()
    # Samples of older weights differ for a good reason.
    limit = config.trainer.max_mismatch_kl if _is_on_policy(batch) else None
    step_metrics = _train(train_step, batch, limit, batches)
    trained = time.monotonic()
    publisher.publish(step + 1)
    published = time.monotonic()
    # A batch of this step was sampled from these weights or newer ones; nobody asks for older ones again.
    publisher.prune(keep_from=step - config.orchestrator.max_off_policy_steps)
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


def _train(train_step: TrainStep, batch: Batch, limit: float | None, batches: BatchFolder) -> StepMetrics:
    """Take the step; of one that is refused for NaN or infinity, say where its batch is.

    Raises:
        NonFiniteLoss: with the file's name.
    """
    try:
        return train_step.run(batch, max_mismatch_kl=limit)
    except NonFiniteLoss as error:
        raise NonFiniteLoss(
            f"{error} The batch is in {batches.step_path(batch.step)}; latepix.trace.training.decode_batch reads it."
        ) from error


def _is_on_policy(batch: Batch) -> bool:
    return all((one.policy_versions == batch.step).all() for one in batch.micro_batches)


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
