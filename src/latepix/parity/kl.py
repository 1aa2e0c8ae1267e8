"""`latepix parity`: sample from the server, hold its logprobs against the trainer's, take the step, publish, repeat.

In: the config of a run. One process trains and plays the rollouts, with the functions of `latepix rl`; the server is
the configured one, or the one that runs at `inference.url`. Out: `parity.md` and `parity.json` in the run folder, the
same Markdown on standard output, and the exit status. What holds:

* every token is compared at the weights version that sampled it, or the run stops;
* real optimizer steps lie in between, and the tokens are held against the weights before the last step, too, so a
  server that does not take new weights is found out, and a run in which that could not be seen says so;
* a step that cannot be trained any more (NaN) is in the tables, and is the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from latepix.config.loader import collect_versions, write_config
from latepix.config.schema import ParityConfig
from latepix.errors import ConfigError, StaleWeights
from latepix.families.facts import local_facts
from latepix.inference.facts import Facts
from latepix.launcher import check_inputs, inference_server
from latepix.metrics import MetricsTail
from latepix.orchestrator.batch import prepare_batch
from latepix.orchestrator.group import ScoredGroup
from latepix.orchestrator.loop import Orchestrator
from latepix.parity.kl_report import ParityReport, to_json, to_markdown
from latepix.parity.measure import (
    StepAgreement,
    TokenRecords,
    agreement_of,
    is_passed,
    join_records,
    num_updates_shown,
    tables_of,
    token_records,
    turn_numbers,
    verdict,
    worst_token,
)
from latepix.report.console import Column, RunConsole, print_error
from latepix.runs import new_run_folder
from latepix.trace.training import Batch, TrainingSample
from latepix.trainer.checkpoint import write_weights
from latepix.trainer.loop import rl_train_step
from latepix.trainer.step import TrainStep
from latepix.transport.files import write_bytes

#: Parameters by name.
Weights: TypeAlias = dict[str, torch.Tensor]


def _tiny(value: float) -> str:
    return f"{value:.1e}"


#: What the console shows of a step.
_COLUMNS = (
    Column("mean KL", "parity/mismatch_kl/mean", "mismatch_kl {}", _tiny),
    Column("max KL", "parity/mismatch_kl/max", "max {}", _tiny),
    Column("version before", "parity/mismatch_kl_before/mean", "version before {}", _tiny),
    Column("tokens", "parity/tokens/count", "{} tokens"),
    Column("entropy", "parity/entropy/mean", "entropy {}"),
    Column("failed", "rollout/failed/count", "{} failed", hide_zero=True),
    Column("s", "time/step_s", "{} s"),
)


def run_parity(config: ParityConfig) -> int:
    """Measure, and print and write the tables.

    Returns:
        Exit status: 0 if the mean mismatch KL of every step is below `parity.max_kl` and no step was served by the
        weights before, else 1.
    Raises:
        ConfigError: before anything is started.
        HandshakeFailed: server and trainer are set up differently; nothing was measured.
        StaleWeights: a rollout was sampled by other weights than the newest.
        RolloutError: too many rollouts of a step failed.
        ProcessFailed: the server died.
    """
    if config.inference.weight_update == "nccl":
        raise ConfigError(
            "inference.weight_update: got nccl, wanted safetensors_dir or reload_weights: parity hands weights over "
            "in a folder."
        )
    check_inputs(config)
    with new_run_folder(config.output_dir):
        write_config(config, config.output_dir)
        report = _measure(config)
        text = to_markdown(report)
        write_bytes(config.output_dir / "parity.json", to_json(report))
        write_bytes(config.output_dir / "parity.md", text.encode())
    print(text, end="", flush=True)
    if not report.passed:
        print_error(report.verdict)
    return 0 if report.passed else 1


def _measure(config: ParityConfig) -> ParityReport:
    title = f"latepix parity  {config.output_dir}  ({config.environment.type}, {config.model.path})"
    # On standard error: standard output is the Markdown.
    with RunConsole(title, config.parity.steps, columns=_COLUMNS, done_key="time/step_s", file=sys.stderr) as console:
        _say(console, "loading the model")
        # Before the server: what is wrong with model or trainer is told in seconds, vLLM takes minutes.
        train_step = rl_train_step(config, total_steps=config.parity.steps)
        try:
            # A folder of its own: it writes the config that its process reads.
            folder = config.output_dir / "server"
            _say(console, f"waiting for {config.inference.url or f'the server, whose log is in {folder}/logs'}")
            with inference_server(config.model_copy(update={"output_dir": folder})) as base_url:
                _say(console, "comparing settings")
                return asyncio.run(_Parity(config, base_url, train_step, console).run())
        finally:
            train_step.close()


def _say(console: RunConsole, text: str) -> None:
    """Say what is being waited for, on a terminal and in a log."""
    console.status(text)
    if not console.is_live:
        print(f"latepix parity: {text}", file=sys.stderr, flush=True)


def _like_rl(config: ParityConfig, base_url: str) -> ParityConfig:
    """Return the config under which `rl` plays steps as parity wants them.

    All groups are compared: whether their rewards differ says nothing about logprobs.
    """
    return config.model_copy(
        update={
            "steps": config.parity.steps,
            "inference": config.inference.model_copy(update={"url": base_url}),
            "orchestrator": config.orchestrator.model_copy(
                update={
                    "prompts_per_step": config.parity.batch // config.orchestrator.group_size,
                    "max_off_policy_steps": 0,
                    "drop_zero_spread_groups": False,
                }
            ),
        }
    )


class _Parity:
    """A server, a trainer at the same weights, and what was found so far."""

    def __init__(self, config: ParityConfig, base_url: str, train_step: TrainStep, console: RunConsole) -> None:
        self._config = _like_rl(config, base_url)
        self._train_step = train_step
        self._console = console
        self._orchestrator = Orchestrator(self._config)
        self._tail = MetricsTail(config.output_dir / "metrics.jsonl")
        self._steps: list[StepAgreement] = []
        self._records: list[TokenRecords] = []
        self._before: Weights | None = None

    async def run(self) -> ParityReport:
        """Take all steps."""
        client = self._orchestrator.client
        try:
            trainer = local_facts(self._config.model.path, engine="trainer", dtype=self._config.model.dtype)
            server, differences = await self._orchestrator.server.shake_hands(trainer)
            self._console.status("sampling")
            for step in range(self._config.parity.steps):
                if not await self._step(step):
                    break
        finally:
            await client.close()
            self._orchestrator.metrics.close()
        tables, max_kl = tables_of(join_records(self._records)), self._config.parity.max_kl
        return ParityReport(
            passed=is_passed(self._steps, max_kl=max_kl),
            threshold=max_kl,
            verdict=verdict(self._steps, tables, max_kl=max_kl),
            num_updates_shown=num_updates_shown(self._steps),
            settings=_settings(self._config, server, trainer),
            differences=tuple(differences),
            steps=tuple(self._steps),
            tables=tables,
        )

    async def _step(self, step: int) -> bool:
        """Sample, compare, train, publish; returns whether the weights can be trained on."""
        started = time.monotonic()
        orchestrator = self._orchestrator
        groups = await orchestrator.play_step(step)
        orchestrator.record(step, groups)
        samples, counts = orchestrator.to_samples(groups)
        if not samples:
            orchestrator.nothing_to_train(step, groups, counts)
        _check_versions(samples, step)
        played = time.monotonic()
        (batch,) = prepare_batch(
            [msgspec.structs.replace(one, trace_id=_sample_name(one.trace_id, one.branch)) for one in samples],
            step=step,
            micro_batch_tokens=self._config.orchestrator.micro_batch_tokens,
            micro_batch_image_tokens=self._config.orchestrator.micro_batch_image_tokens,
        )
        turns = _turns_of(groups)
        records = compare(self._train_step, batch, turns)
        measured = _step_agreement(step, groups, batch, records)
        if self._before is not None:
            with weights_replaced(self._train_step.model, self._before):
                before = agreement_of(compare(self._train_step, batch, turns)).mismatch_kl_mean
            measured = msgspec.structs.replace(measured, mismatch_kl_mean_before=before)
        is_finite = bool(np.isfinite(records.mismatch_kls()).all())
        if is_finite:
            self._before = copy_weights(self._train_step.model)
            self._train_step.run(batch)
            await self._publish(step + 1)
        self._steps.append(measured)
        self._records.append(records)
        orchestrator.metrics.write(
            step, _metrics(measured) | {"time/generate_s": played - started, "time/step_s": time.monotonic() - started}
        )
        self._console.update(self._tail.read())
        return is_finite

    async def _publish(self, policy_version: int) -> None:
        """Hand the trainer's weights to the server."""
        weights, step = self._orchestrator.weights, self._train_step
        path = weights.publish(policy_version, lambda folder: write_weights(folder, step.model, step.adapter))
        await self._orchestrator.server.load(path.resolve(), policy_version)
        weights.prune(keep_from=policy_version)


def compare(train_step: TrainStep, batch: Batch, turns: Mapping[str, np.ndarray]) -> TokenRecords:
    """Compute the trainer's logprobs of a batch's trained tokens, without gradient, beside the server's.

    Args:
        train_step: the trainer, at the weights that it is compared at.
        batch: its `trace_ids` name the samples, no two alike.
        turns: of each sample, from `turn_numbers`.
    """
    parts = []
    for micro_batch in batch.micro_batches:
        outputs = train_step.measure(micro_batch)
        arrays = (values.float().cpu().numpy() for values in (outputs.trainer_logprobs, outputs.entropies))
        parts.append(token_records(micro_batch, *arrays, turns))
    return join_records(parts)


def copy_weights(model: PreTrainedModel) -> Weights:
    """Return a copy of a model's parameters, in the memory of the CPU."""
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()}


@contextlib.contextmanager
def weights_replaced(model: PreTrainedModel, weights: Weights) -> Generator[None]:
    """Let a model have other weights for a while; its own are the same bits afterwards."""
    own = copy_weights(model)
    _set_weights(model, weights)
    try:
        yield
    finally:
        _set_weights(model, own)


def _set_weights(model: PreTrainedModel, weights: Weights) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def _sample_name(trace_id: str, branch: int) -> str:
    return f"{trace_id}/{branch}"


def _turns_of(groups: Sequence[ScoredGroup]) -> dict[str, np.ndarray]:
    """Number the turns of every branch, by the name of its sample."""
    return {
        _sample_name(trace.id, number): turn_numbers(branch.sampled_mask)
        for group in groups
        for trace in group.traces
        for number, branch in enumerate(trace.branches)
    }


def _check_versions(samples: Sequence[TrainingSample], policy_version: int) -> None:
    """Refuse a sample of other weights than the trainer's.

    Raises:
        StaleWeights: names the first one.
    """
    for sample in samples:
        if sample.policy_version != policy_version:
            raise StaleWeights(
                f"Step {policy_version}, trace {sample.trace_id}, branch {sample.branch}: sampled by policy version "
                f"{sample.policy_version}, wanted {policy_version}, which the server was given. Another trainer "
                "updates the same server, or it was started anew."
            )


def _step_agreement(step: int, groups: Sequence[ScoredGroup], batch: Batch, records: TokenRecords) -> StepAgreement:
    traces = [trace for group in groups for trace in group.traces]
    num_failed = sum(len(group.failed) for group in groups)
    return StepAgreement(
        step=step,
        agreement=agreement_of(records),
        num_rollouts=len(traces) + num_failed,
        num_failed=num_failed,
        num_pictures=sum(len(micro_batch.mm_refs.refs) for micro_batch in batch.micro_batches),
        reward_mean=sum(float(trace.reward or 0.0) for trace in traces) / len(traces),
        entropy_mean=float(records.entropies.astype(np.float64).mean()),
        mismatch_kl_mean_before=None,
        worst=worst_token(records),
    )


def _metrics(measured: StepAgreement) -> dict[str, float]:
    """Return the numbers of a step for `metrics.jsonl`."""
    agreement = measured.agreement
    values = {
        "parity/mismatch_kl/mean": agreement.mismatch_kl_mean,
        "parity/mismatch_kl/max": agreement.mismatch_kl_max,
        "parity/abs_log_ratio/mean": agreement.abs_log_ratio_mean,
        "parity/mismatch_kl_before/mean": measured.mismatch_kl_mean_before,
        "parity/tokens/count": agreement.num_tokens,
        "parity/entropy/mean": measured.entropy_mean,
        "rollout/reward/mean": measured.reward_mean,
        "rollout/traces/count": measured.num_rollouts,
        "rollout/failed/count": measured.num_failed,
        "rollout/pictures/count": measured.num_pictures,
    }
    return {key: value for key, value in values.items() if value is not None}


def _settings(config: ParityConfig, server: Facts, trainer: Facts) -> dict[str, str]:
    """Return what was compared, by name, as text."""
    program, *args = sys.argv
    orchestrator, parity = config.orchestrator, config.parity
    return {
        "command": shlex.join([Path(program).name, *args]),
        "commit": collect_versions()["commit"] or "not known",
        "model": str(config.model.path),
        "family": str(trainer.model_type),
        "dtype": config.model.dtype,
        "server": f"{server.engine}, {_versions(server)}",
        "trainer": _versions(trainer),
        "weight updates": config.inference.weight_update,
        "environment": config.environment.type,
        "rollouts": f"{parity.steps} steps x {parity.batch}, in groups of {orchestrator.group_size}",
        "temperature": f"{config.sampling.temperature:g}",
        "max_tokens": f"{config.sampling.max_tokens} a turn",
        "learning rate": f"{config.trainer.optim.lr:g}",
        "seed": str(config.seed),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
    }


def _versions(facts: Facts) -> str:
    versions = dict(facts.versions)
    engine = versions.pop("engine", "not known")
    named = [f"{name} {version}" for name, version in sorted(versions.items())]
    return ", ".join([f"{'vllm' if facts.engine == 'vllm' else 'latepix'} {engine}", *named])
