"""`latepix sft`: supervised warm start on demonstrations, with the samples, packing and forward of RL."""

from __future__ import annotations

import time

import numpy as np

from latepix.config.loader import write_config
from latepix.config.schema import SftConfig
from latepix.environments.base import Environment, checked_task, load_environment
from latepix.errors import ConfigError
from latepix.inference.render import MessageRenderer
from latepix.metrics import MetricsTail, MetricsWriter, peak_rss_bytes
from latepix.orchestrator.batch import prepare_batch, validate_sample
from latepix.orchestrator.samples import trace_to_samples
from latepix.report.console import SFT_COLUMNS, RunConsole
from latepix.runs import new_run_folder, picture_door
from latepix.trace.graph import Trace, TraceBuilder
from latepix.trace.ingress import InlineImage
from latepix.trace.messages import assistant_message, iter_images
from latepix.trace.training import TrainingSample
from latepix.trainer.checkpoint import export_model
from latepix.trainer.loss import cross_entropy
from latepix.trainer.step import TrainStep


def run_sft(config: SftConfig) -> None:
    """Train on demonstrations and write the model to `model/` of the run folder.

    Raises:
        ConfigError: a setting or the environment is wrong.
        EnvError: a demonstration is wrong; names its task.
    """
    with new_run_folder(config.output_dir):
        train_step = TrainStep(config.model, config.trainer, loss=cross_entropy, total_steps=config.steps)
        environment = load_environment(config.environment, picture_door(config.images, train_step.info))
        write_config(config, config.output_dir)
        metrics = MetricsWriter(config.output_dir / "metrics.jsonl")
        try:
            _train(config, train_step, environment, metrics)
            export_model(train_step.source, config.output_dir / "model", train_step.model, train_step.adapter)
        finally:
            train_step.close()
            metrics.close()


def _train(config: SftConfig, train_step: TrainStep, environment: Environment, metrics: MetricsWriter) -> None:
    renderer = MessageRenderer(train_step.info)
    rng = np.random.default_rng([config.seed, 2])
    order = _task_order(environment, config, rng)
    tail = MetricsTail(config.output_dir / "metrics.jsonl")
    with RunConsole(f"latepix sft  {config.output_dir}", config.steps, columns=SFT_COLUMNS) as console:
        for step in range(config.steps):
            started = time.monotonic()
            indices = order[step * config.batch_size : (step + 1) * config.batch_size]
            samples = [demonstration_sample(environment, renderer, index, rng) for index in indices]
            (batch,) = prepare_batch(samples, step=step, micro_batch_tokens=config.micro_batch_tokens)
            values = train_step.run(batch).values
            seconds = time.monotonic() - started
            metrics.write(step, values | {"time/step_s": seconds, "process/trainer/peak_rss_bytes": peak_rss_bytes()})
            console.update(tail.read())


def _task_order(environment: Environment, config: SftConfig, rng: np.random.Generator) -> list[int]:
    """Return the demonstrations of all steps: epochs in random order.

    Raises:
        ConfigError: the environment has none.
    """
    indices = environment.demonstration_indices()
    if not indices:
        raise ConfigError(f"environment.type: {environment.name} has no demonstrations to train on, wanted at least 1.")
    order: list[int] = []
    while len(order) < config.steps * config.batch_size:
        order += rng.permutation(indices).tolist()
    return order


def demonstration_sample(
    environment: Environment, renderer: MessageRenderer, index: int, rng: np.random.Generator
) -> TrainingSample:
    """Build the sample of one demonstration: every turn's prompt, expanded here, and its answer's tokens.

    As in a rollout, a turn extends the tokens of the turns before it; nothing is tokenized twice.

    Raises:
        ConfigError: the environment demonstrates no turn, or the model's template rewrites earlier turns.
        PlaceholderMismatch: prompt, pictures and ranges do not fit.
    """
    task = checked_task(environment, "train", index)
    info = renderer.info
    builder = TraceBuilder(f"demonstration-{index}", info.placeholder_ids)
    images: list[InlineImage] = []
    last: tuple[list[int], list[int]] | None = None
    for number, turn in enumerate(environment.demonstration_turns(task, rng)):
        prompt = renderer.render(turn.messages) if last is None else renderer.extend(*last, turn.messages)
        if prompt is None:
            raise ConfigError(
                f"environment.type: {environment.name}, task {task.id}, turn {number}: the template of "
                f"{info.model_type} rewrites earlier turns, so that a demonstration of several turns is not one "
                "sample; demonstrate a single turn instead."
            )
        images += iter_images(turn.messages)
        expanded, ranges = info.expand(prompt.token_ids, images)
        answer_ids = renderer.answer_ids(turn.answer)
        builder.commit_turn(
            messages=turn.messages,
            message_ends=prompt.message_ends,
            logical_ids=prompt.token_ids,
            effective_ids=expanded,
            ranges=ranges,
            reply=assistant_message(turn.answer),
            sampled_ids=answer_ids,
            logprobs=[0.0] * len(answer_ids),
            policy_version=None,
            finish_reason="stop",
        )
        last = (prompt.token_ids, answer_ids)
    if last is None:
        raise ConfigError(
            f"environment.type: {environment.name}, task {task.id}: its demonstration has 0 turns, wanted at least 1."
        )
    trace = Trace(id=builder.trace_id, environment=environment.name, task_id=task.id, nodes=tuple(builder.nodes))
    (sample,) = trace_to_samples(trace)
    validate_sample(sample, info)
    return sample
