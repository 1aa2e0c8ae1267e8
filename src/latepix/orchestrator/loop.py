"""The orchestrator process: sync weights, play groups, score, pack, ship; one call of `_step` per optimizer step."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import Mapping, Sequence

import numpy as np

from latepix.config.schema import RunConfig
from latepix.environments.base import Environment, Split, count_tasks, load_environment
from latepix.errors import ConfigError, RolloutError, StaleWeights, TransportError
from latepix.families.model_info import read_model_info
from latepix.inference.client import InferenceClient, Sampling
from latepix.inference.http import wait_until_healthy
from latepix.inference.render import MessageRenderer
from latepix.metrics import MetricsWriter, peak_rss_bytes
from latepix.orchestrator.batch import prepare_batch, truncate_sample
from latepix.orchestrator.group import (
    ScoredGroup,
    check_evaluation,
    check_failures,
    reward_part_means,
    rollout_metrics,
    score_group,
)
from latepix.orchestrator.rollout import RolloutSpec, make_task, play
from latepix.orchestrator.samples import trace_to_samples
from latepix.orchestrator.server import ServedWeights, client_of, routing_of
from latepix.runs import picture_door
from latepix.trace.graph import Trace
from latepix.trace.store import TraceWriter
from latepix.trace.training import TrainingSample
from latepix.transport.files import POLL_S
from latepix.transport.rollouts import BatchFolder
from latepix.transport.weights import WeightsFolder

#: How the orchestrator's log begins, until the server answers.
WAITING_FOR_SERVER = "waiting for the inference server"


class Orchestrator:
    """Plays rollouts against one server and feeds one trainer."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.info = read_model_info(config.model.path)
        if config.inference.port == 0 and config.inference.url is None:
            raise ConfigError(
                "inference.port: got 0, wanted the port of a server that runs (or inference.url). `latepix serve` "
                "prints its port; `latepix rl` starts a server of its own."
            )
        self.renderer = MessageRenderer(self.info)
        self.environment = load_environment(config.environment, picture_door(config.images, self.info))
        self.client = client_of(config, self.info)
        self.server = ServedWeights(config, self.client, self.renderer)
        self.batches = BatchFolder(config.output_dir)
        self.weights = WeightsFolder(config.output_dir)
        self.weights.check_unused()
        self.batches.check_unused()
        self.traces = TraceWriter(config.output_dir)
        self.metrics = MetricsWriter(config.output_dir / "metrics.jsonl")
        self.policy_version = 0
        self._next_eval = 0.0

    async def run(self) -> None:
        """Run all steps; returns when the last weights were evaluated."""
        print(f"latepix: {WAITING_FOR_SERVER} at {self.client.base_url}", flush=True)
        wait_until_healthy(self.client.base_url, timeout_s=self.config.inference.startup_timeout_s)
        try:
            await self.server.greet()
            # From here on a server may be paused for new weights: whoever ends this process lets it go on first.
            task = asyncio.current_task()
            if task is not None:
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
            print("latepix: measuring the reward before training", flush=True)
            await self._final_eval()
            for step in range(self.config.steps):
                await self._step(step)
            await self._sync_weights(at_least=self.config.steps)
            await self._eval_if_due(is_last=True)
            await self._final_eval()
        finally:
            await self.client.close()
            self.metrics.close()

    async def _step(self, step: int) -> None:
        started = time.monotonic()
        await self._sync_weights(at_least=step - self.config.orchestrator.max_off_policy_steps)
        waited_s = time.monotonic() - started
        await self._eval_if_due()
        synced = time.monotonic()
        groups = await self.play_step(step)
        played = time.monotonic()
        self.record(step, groups)
        samples, counts = self.to_samples(groups)
        if not samples:
            self.nothing_to_train(step, groups, counts)
        (batch,) = prepare_batch(
            samples,
            step=step,
            micro_batch_tokens=self.config.orchestrator.micro_batch_tokens,
            micro_batch_image_tokens=self.config.orchestrator.micro_batch_image_tokens,
        )
        num_bytes = self.batches.send(batch)
        inference_rss_bytes = 0
        # A figure for people: a server that does not give it once does not end the run.
        with contextlib.suppress(TransportError):
            inference_rss_bytes = await self.server.control.peak_rss_bytes() or 0
        shipped = time.monotonic()
        self.metrics.write(
            step,
            rollout_metrics(groups)
            | counts
            | {
                "policy/version": self.policy_version,
                "policy/off_policy_steps": step - self.policy_version,
                "batch/samples/count": batch.num_samples,
                "batch/micro_batches/count": len(batch.micro_batches),
                "batch/bytes": num_bytes,
                "batch/bytes_per_sample": num_bytes / max(1, batch.num_samples),
                "time/wait_weights_s": waited_s,
                "time/generate_s": played - synced,
                "time/pack_s": shipped - played,
                "time/step_s": waited_s + shipped - synced,
                "perf/samples_per_s": batch.num_samples / (waited_s + shipped - synced),
                "inference/retries/count": self.client.num_retries,
                "process/orchestrator/peak_rss_bytes": peak_rss_bytes(),
                "process/inference/peak_rss_bytes": inference_rss_bytes,
            }
            | self.server.metrics,
        )

    async def _sync_weights(self, *, at_least: int) -> None:
        """Wait until weights `at_least` are published, and let the server load the newest."""
        deadline = time.monotonic() + self.config.trainer.wait_timeout_s
        while True:
            newest = self.weights.newest() or 0
            if newest >= at_least:
                break
            if time.monotonic() > deadline:
                raise TransportError(
                    f"Waited {self.config.trainer.wait_timeout_s:g} s for weights of version {at_least}; the newest is "
                    f"{newest} (trainer.wait_timeout_s)."
                )
            await asyncio.sleep(POLL_S)
        if newest > self.policy_version:
            await self.server.update(self.weights.version_path(newest).resolve(), newest)
            self.policy_version = newest

    async def play_step(self, step: int) -> list[ScoredGroup]:
        """Play and score the groups of a step."""
        orchestrator = self.config.orchestrator
        indices = self._task_indices(step)
        slots = asyncio.Semaphore(max(1, orchestrator.max_in_flight // orchestrator.group_size))

        async def play_group(number: int, index: int) -> ScoredGroup:
            async with slots:
                group_id = step * orchestrator.prompts_per_step + number
                traces = await self._play_siblings(index, step, group_id)
                return score_group(traces, kind=orchestrator.advantage)

        return await asyncio.gather(*(play_group(number, index) for number, index in enumerate(indices)))

    async def _play_siblings(self, index: int, step: int, group_id: int) -> list[Trace]:
        sampling = self.config.sampling
        seed = int(np.random.default_rng([self.config.seed, 1, group_id]).integers(1 << 30))
        task, problem = make_task(self.environment, "train", index)
        specs = [
            RolloutSpec(
                trace_id=f"s{step}-g{group_id}-r{number}",
                task=task,
                split="train",
                step=step,
                group_id=group_id,
                sampling=Sampling(temperature=sampling.temperature, max_tokens=sampling.max_tokens, seed=seed + number),
                task_index=index,
                problem=problem,
                routing=routing_of(self.config, group_id),
            )
            for number in range(self.config.orchestrator.group_size)
        ]
        return await asyncio.gather(
            *(_play(self.environment, self.client, self.renderer, self.config, spec) for spec in specs)
        )

    def _task_indices(self, step: int) -> list[int]:
        """Return the training tasks of a step: epochs in an order drawn from the run's seed, none repeated within."""
        num_tasks = count_tasks(self.environment, "train")
        if num_tasks < 1:
            raise ConfigError(
                f"environment.type: {self.environment.name} has {num_tasks} tasks in split train, wanted at least 1."
            )
        first = step * self.config.orchestrator.prompts_per_step
        positions = range(first, first + self.config.orchestrator.prompts_per_step)
        orders: dict[int, np.ndarray] = {}
        for epoch in {position // num_tasks for position in positions}:
            orders[epoch] = np.random.default_rng([self.config.seed, 0, epoch]).permutation(num_tasks)
        return [int(orders[position // num_tasks][position % num_tasks]) for position in positions]

    def record(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """Write traces and quarantine; stop the run if too much failed."""
        failed = [trace for group in groups for trace in group.failed]
        self.traces.write(f"step_{step:06d}", [trace for group in groups for trace in (*group.traces, *group.failed)])
        if failed:
            self.traces.append_quarantine(failed)
        check_failures(groups, max_failed_frac=self.config.orchestrator.max_failed_frac, step=step)

    def nothing_to_train(self, step: int, groups: Sequence[ScoredGroup], counts: Mapping[str, int]) -> None:
        """Say that a step trains nothing; stop the run if that is not because rewards are all equal.

        Raises:
            RolloutError: no rollout has a trained token that fits.
        """
        num_zero = sum(group.is_zero_spread for group in groups)
        if self.config.orchestrator.drop_zero_spread_groups and num_zero:
            print(
                f"latepix: step {step} trains nothing: {num_zero} of {len(groups)} groups have equal rewards",
                flush=True,
            )
            return
        raise RolloutError(
            f"Step {step}: no rollout has anything to train. {counts['batch/dropped/count']} have no sampled token "
            f"within orchestrator.seq_len = {self.config.orchestrator.seq_len} (`latepix budget` shows how long they "
            "are); the others never asked the policy."
        )

    def to_samples(self, groups: Sequence[ScoredGroup]) -> tuple[list[TrainingSample], dict[str, int]]:
        """Return the samples to train, cut to length, and how many were cut or had to be left out."""
        orchestrator = self.config.orchestrator
        kept: list[TrainingSample] = []
        num_truncated = num_dropped = 0
        for group in groups:
            if group.is_zero_spread and orchestrator.drop_zero_spread_groups:
                continue
            for trace in group.traces:
                for whole in trace_to_samples(trace, temperature=self.config.sampling.temperature):
                    sample = truncate_sample(whole, orchestrator.seq_len)
                    num_dropped += sample is None
                    if sample is not None:
                        num_truncated += sample is not whole
                        kept.append(sample)
        return kept, {"batch/truncated/count": num_truncated, "batch/dropped/count": num_dropped}

    async def _eval_if_due(self, *, is_last: bool = False) -> None:
        """Measure greedy reward on held-out tasks, with the weights that are served."""
        if not (is_last or self.policy_version >= self._next_eval):
            return
        self._next_eval = self.policy_version + (self.config.eval.every_steps or math.inf)
        await self._measure("eval", self.config.eval.split)

    async def _final_eval(self) -> None:
        """Measure greedy reward on the split that is looked at only before and after training."""
        await self._measure("final_eval", self.config.eval.final_split)

    async def _measure(self, area: str, split: Split) -> None:
        started = time.monotonic()
        traces = await play_split(
            self.environment, self.client, self.renderer, self.config, split=split, policy_version=self.policy_version
        )
        self.traces.write(f"{area}_{self.policy_version:06d}", traces)
        failed = [trace for trace in traces if trace.failure is not None]
        if failed:
            self.traces.append_quarantine(failed)
        check_evaluation(traces, split=split)
        check_measured(traces, self.policy_version)
        self.metrics.write(
            self.policy_version,
            reward_part_means(traces, area)
            | {
                f"{area}/reward/mean": mean_reward(traces),
                f"{area}/tasks/count": len(traces),
                f"{area}/failed/count": len(failed),
                f"time/{area}_s": time.monotonic() - started,
            },
        )


async def play_split(
    environment: Environment,
    client: InferenceClient,
    renderer: MessageRenderer,
    config: RunConfig,
    *,
    split: Split,
    policy_version: int,
) -> list[Trace]:
    """Play the tasks of a held-out split greedily, once each."""
    num_tasks = count_tasks(environment, split)
    if config.eval.num_tasks:
        num_tasks = min(num_tasks, config.eval.num_tasks)
    slots = asyncio.Semaphore(config.orchestrator.max_in_flight)

    async def play_one(index: int) -> Trace:
        async with slots:
            task, problem = make_task(environment, split, index)
            spec = RolloutSpec(
                trace_id=f"{split}-v{policy_version}-t{index}",
                task=task,
                split=split,
                step=policy_version,
                group_id=index,
                sampling=Sampling(temperature=0.0, max_tokens=config.sampling.max_tokens),
                task_index=index,
                problem=problem,
                routing=routing_of(config, index),
            )
            return await _play(environment, client, renderer, config, spec)

    return await asyncio.gather(*(play_one(index) for index in range(num_tasks)))


async def _play(
    environment: Environment, client: InferenceClient, renderer: MessageRenderer, config: RunConfig, spec: RolloutSpec
) -> Trace:
    """Play one task under the limits of a run."""
    return await play(
        environment,
        client,
        renderer,
        spec,
        max_images=config.images.max_per_prompt,
        max_model_len=renderer.info.max_len(config.inference.max_model_len),
        timeout_s=config.orchestrator.rollout_timeout_s,
    )


def mean_reward(traces: Sequence[Trace]) -> float:
    """Return the mean reward; a failed rollout earns 0."""
    return sum(float(trace.reward or 0.0) for trace in traces) / max(1, len(traces))


def check_measured(traces: Sequence[Trace], policy_version: int) -> None:
    """Refuse an evaluation of other weights: a server that was started anew serves those it began with.

    Raises:
        StaleWeights: names the first answer of another version.
    """
    for trace in traces:
        for node in trace.nodes:
            if node.policy_version not in (None, policy_version):
                raise StaleWeights(
                    f"Evaluation of version {policy_version}, trace {trace.id}: an answer came from version "
                    f"{node.policy_version}. The server was started anew, or another run updates it."
                )


def run_orchestrator(config: RunConfig) -> None:
    """Run the orchestrator process to its end.

    Raises:
        ConfigError: a setting is wrong for a process that is started alone.
    """
    try:
        asyncio.run(Orchestrator(config).run())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
