"""`latepix rl` and `latepix eval`: start the processes of a run, watch them, show progress, stop everything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from latepix.budget import measure_budget, print_briefly
from latepix.config.loader import write_config
from latepix.config.schema import RunConfig
from latepix.environments.base import load_environment
from latepix.errors import LatepixError, ProcessFailed
from latepix.families.facts import local_facts
from latepix.families.model_info import ModelInfo, read_model_info
from latepix.inference.control import ServerControl
from latepix.inference.facts import check_handshake, needs_of
from latepix.inference.http import wait_until_healthy
from latepix.inference.render import MessageRenderer
from latepix.inference.vllm import explain_log, find_vllm
from latepix.metrics import MetricsTail
from latepix.orchestrator.group import check_evaluation
from latepix.orchestrator.loop import WAITING_FOR_SERVER, mean_reward, play_split
from latepix.orchestrator.server import client_of
from latepix.processes import Child, free_port
from latepix.report.console import RunConsole, print_summary
from latepix.report.html import write_report
from latepix.runs import new_run_folder, picture_door, write_summary
from latepix.trace.store import TraceWriter
from latepix.transport.files import write_bytes

#: How often the launcher looks at its children and at the metrics, seconds.
_LOOK_S = 0.2
#: How often a start that takes long is told about where nothing is drawn, seconds.
_TELL_S = 30.0
#: What is played without a server before a run starts, to say what pictures cost: tasks, and seconds.
_BUDGET_TASKS, _BUDGET_S = 16, 1.0


def run_rl(config: RunConfig) -> dict[str, Any]:
    """Run the whole loop.

    A run that fails or is interrupted leaves its summary and its report behind, too.

    Returns:
        What `summary.json` holds.
    Raises:
        ConfigError: before anything is started.
        ProcessFailed: a process died; carries its own error and its log.
    """
    started = time.monotonic()
    config = _with_port(config)
    _check_server(config)
    # Finds the mistakes of `check_inputs`, too.
    budget = measure_budget(config, num_tasks=_BUDGET_TASKS, time_limit_s=_BUDGET_S)
    with new_run_folder(config.output_dir):
        path = write_config(config, config.output_dir)
        print_briefly(budget)
        try:
            _run_processes(config, path)
        except (LatepixError, KeyboardInterrupt) as error:
            with contextlib.suppress(LatepixError, OSError):
                write_summary(config, wall_s=time.monotonic() - started, error=str(error) or "interrupted")
                write_report(config.output_dir)
            raise
        summary = write_summary(config, wall_s=time.monotonic() - started)
        print_summary(summary)
        print(f"report: {write_report(config.output_dir)}")
        return summary


def _run_processes(config: RunConfig, path: Path) -> None:
    """Start the three processes of a run and watch them to their end."""
    title = f"latepix rl  {config.output_dir}  ({config.environment.type}, {config.model.path})"
    logs = config.output_dir / "logs"
    metrics = MetricsTail(config.output_dir / "metrics.jsonl")
    with _children() as children, RunConsole(title, config.steps, done_key="time/publish_s") as console:
        inference = None
        if config.inference.url is None:
            inference = _start_server(config, path, logs)
            children.append(inference)
        for command, name, num_threads in (
            ("train", "trainer", config.trainer.num_threads),
            ("orchestrate", "orchestrator", 1),
        ):
            children.append(Child(name, [command, "@", str(path)], logs, num_threads=num_threads))
        orchestrator = children[-1]
        others = children[-2:]
        starting = StartProgress(config.inference.engine, inference, orchestrator)
        while any(child.exit_code is None for child in others):
            if orchestrator.exit_code == 0 and not _is_over(metrics.read(), config):
                break
            for child in children:
                child.check()
            if inference is not None and inference.exit_code == 0:
                raise ProcessFailed(f"The inference process ended before the run did. Its log: {inference.log_path}")
            rows = metrics.read()
            if rows:
                console.status(_what_now(rows, config))
                console.update(rows)
            else:
                console.status(starting.text())
                if not console.is_live:
                    starting.print_sometimes()
            time.sleep(_LOOK_S)
        for child in others:
            child.check()
        rows = metrics.read()
        console.update(rows)
        if not _is_over(rows, config):
            raise ProcessFailed(f"The orchestrator process ended before the run did. Its log: {logs}/orchestrator.log")


def _start_server(config: RunConfig, path: Path, logs: Path) -> Child:
    """Start the inference server of a config that lies at `path`."""
    return Child(
        "inference",
        ["serve", "@", str(path)],
        logs,
        num_threads=config.inference.num_threads,
        explain=explain_log if config.inference.engine == "vllm" else None,
    )


class StartProgress:
    """Says what is going on until a run has measured something; vLLM alone takes a minute and more.

    Args:
        engine: of the server.
        server: its process; None if it runs already.
        orchestrator: says what it waits for, once the server answers; None if there is none.
    """

    def __init__(self, engine: str, server: Child | None, orchestrator: Child | None = None) -> None:
        self._engine = engine
        self._server = server
        self._orchestrator = orchestrator
        self._started = self._printed = time.monotonic()

    def text(self) -> str:
        """Return one line: what is waited for, and how long it takes so far."""
        passed = time.monotonic() - self._started
        stage = self._orchestrator.last_line if self._orchestrator is not None else ""
        stage = stage.removeprefix("latepix: ")
        if self._server is None or (stage and not stage.startswith(WAITING_FOR_SERVER)):
            return f"{stage or WAITING_FOR_SERVER}, {passed:.0f} s"
        return f"starting the {self._engine} engine, {passed:.0f} s: {self._server.last_line[-160:]}"

    def print_sometimes(self) -> None:
        """Print the line where there is no live display, every half minute."""
        if time.monotonic() - self._printed >= _TELL_S:
            self._printed = time.monotonic()
            print(f"latepix: {self.text()}", file=sys.stderr, flush=True)


def _is_over(rows: list[dict[str, float]], config: RunConfig) -> bool:
    """Whether the orchestrator has measured the last weights, which is the last thing it does."""
    return bool(rows) and rows[-1]["step"] == config.steps and "final_eval/reward/mean" in rows[-1]


def run_eval(config: RunConfig) -> dict[str, Any]:
    """Measure the greedy reward of a model on `eval.split`; everything goes to `eval/` of the run folder.

    Returns:
        What `eval/eval.json` holds.
    Raises:
        ConfigError: before anything is started.
        ProcessFailed: the server died.
        RolloutError: every rollout failed.
    """
    config = config.model_copy(update={"output_dir": config.output_dir / "eval"})
    check_inputs(config)
    with inference_server(config) as base_url:
        result = asyncio.run(_evaluate(at_server(config, base_url)))
    write_bytes(config.output_dir / "eval.json", (json.dumps(result, indent=2) + "\n").encode())
    print(json.dumps(result))
    return result


@contextlib.contextmanager
def inference_server(config: RunConfig) -> Generator[str]:
    """Run the inference server of a config, with its log in `output_dir`/logs; yields its address once it answers.

    With `inference.url` it runs already, and is left running.

    Raises:
        ConfigError: the port is taken.
        ProcessFailed: the server died.
    """
    _check_server(config)
    if config.inference.url is not None:
        wait_until_healthy(config.inference.url, timeout_s=config.inference.startup_timeout_s)
        yield config.inference.url
        return
    config = _with_port(config)
    # `parity` and `doctor` have settings of their own that `serve` does not know.
    path = write_config(
        RunConfig(**{name: getattr(config, name) for name in RunConfig.model_fields}), config.output_dir
    )
    with _children() as children:
        inference = _start_server(config, path, config.output_dir / "logs")
        children.append(inference)
        starting = StartProgress(config.inference.engine, inference)

        def look() -> None:
            inference.check()
            starting.print_sometimes()

        wait_until_healthy(config.inference.base_url, timeout_s=config.inference.startup_timeout_s, check=look)
        try:
            yield config.inference.base_url
        finally:
            # A server that died explains better than the rollouts that failed for it.
            inference.check()


async def _evaluate(config: RunConfig) -> dict[str, Any]:
    info = read_model_info(config.model.path)
    environment = load_environment(config.environment, picture_door(config.images, info))
    client = client_of(config, info)
    try:
        weight_version = await _check_served(config, ServerControl(client.connection), info)
        traces = await play_split(
            environment, client, MessageRenderer(info), config, split=config.eval.split, policy_version=0
        )
    finally:
        await client.close()
    TraceWriter(config.output_dir).write("eval_000000", traces)
    check_evaluation(traces, split=config.eval.split)
    return {
        "environment": environment.name,
        "split": config.eval.split,
        "model": str(config.model.path),
        "weight_version": weight_version,
        "reward": mean_reward(traces),
        "num_tasks": len(traces),
        "num_failed": sum(trace.failure is not None for trace in traces),
    }


async def _check_served(config: RunConfig, control: ServerControl, info: ModelInfo) -> str | None:
    """Refuse a server that serves something else than the model that is measured; returns its weight version.

    Raises:
        HandshakeFailed: names every setting that differs, with both values.
    """
    server = await control.facts()
    ours = local_facts(config.model.path, engine="trainer", dtype=config.model.dtype, with_processor=False)
    # Pictures are not processed in this process, and weights stay as they are.
    needs = msgspec.structs.replace(needs_of(config, info), weight_transfer=None)
    check_handshake(server, ours, needs)
    return server.weight_version


def check_inputs(config: RunConfig) -> None:
    """Find mistakes before any process is started: model folder, family, environment.

    Raises:
        ConfigError: names what is wrong.
    """
    info = read_model_info(config.model.path)
    load_environment(config.environment, picture_door(config.images, info))


def _check_server(config: RunConfig) -> None:
    """Find out before anything is started that vLLM is not where it should be.

    Raises:
        ConfigError: says what is missing, and how to get it.
    """
    if config.inference.engine == "vllm" and config.inference.url is None:
        find_vllm(config.inference.vllm.python)


def at_server(config: RunConfig, base_url: str) -> RunConfig:
    """Return the config of something that talks to the server at `base_url`."""
    return config.model_copy(update={"inference": config.inference.model_copy(update={"url": base_url})})


def _with_port(config: RunConfig) -> RunConfig:
    """Fix the port, so that every process reads the same one."""
    if config.inference.url is not None:
        return config
    port = free_port(config.inference.host, config.inference.port)
    inference = config.inference.model_copy(update={"port": port})
    return config.model_copy(update={"inference": inference})


def _what_now(rows: list[dict[str, float]], config: RunConfig) -> str:
    step = int(max(row["step"] for row in rows))
    return "measuring the final reward" if step >= config.steps else ""


@contextlib.contextmanager
def _children() -> Generator[list[Child]]:
    """Collect children and stop them all on the way out, whatever happens."""
    children: list[Child] = []

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield children
    finally:
        # Whoever is impatient and asks again must not keep us from stopping the others.
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
        for child in reversed(children):
            child.stop()
        signal.signal(signal.SIGINT, handlers[signal.SIGINT])
        signal.signal(signal.SIGTERM, before)
