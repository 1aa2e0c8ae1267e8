"""The `latepix` command. Each command imports what it needs when it is called, so that `--help` is quick."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from latepix.config.loader import load_config
from latepix.config.schema import BudgetConfig, DoctorConfig, ParityConfig, RunConfig, SftConfig
from latepix.errors import ConfigError, LatepixError
from latepix.families.model_info import read_model_info
from latepix.processes import die_with_parent
from latepix.report.console import print_error

ConfigT = TypeVar("ConfigT", RunConfig, BudgetConfig, DoctorConfig, ParityConfig, SftConfig)

_USAGE = """\
usage: latepix COMMAND [@ config.toml] [--section.key value ...]

  rl           the whole loop: starts inference, orchestrator and trainer
  sft          supervised warm start on an environment's demonstrations
  eval         greedy reward on a held-out split; prints and writes JSON
  serve        the inference server alone
  orchestrate  the orchestrator alone
  train        the trainer alone
  parity       do server and trainer agree? mismatch KL over real training steps; exit 1 above the threshold
  doctor       do server and trainer see the same pictures? the picture pack through both; exit 1 on a mismatch
  budget       tokens and bytes of the environment's pictures and turns, before a run; needs no server
  replay       RUN_DIR [--id TRACE_ID]: plays quarantined rollouts again and shows their full errors
  report       RUN_DIR: one self-contained HTML page
  tiny         --family qwen3_vl OUT: a tiny random model of the real class, no download

latepix COMMAND --help lists a command's settings.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A user's mistake is one message, never a traceback."""
    args = list(sys.argv[1:] if argv is None else argv)
    # Models come from folders; nothing here may reach for a hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not args or args[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if args else 2
    command, rest = args[0], args[1:]
    if command not in _COMMANDS:
        print_error(f"unknown command {command!r}\n{_USAGE}")
        return 2
    # As with `python -m latepix`: an environment of the user's own is usually a module in the current folder.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    die_with_parent()
    try:
        return _COMMANDS[command](rest)
    except LatepixError as error:
        print_error(error)
        return 1
    except KeyboardInterrupt:
        print_error("interrupted; every process was stopped")
        return 130


# `read_model_info` comes before torch and transformers: a wrong model folder is told in a second, not in ten.


def _configured(cls: type[ConfigT], args: list[str], name: str, run: Callable[[ConfigT], object]) -> int:
    config = load_config(cls, args, prog=f"latepix {name}")
    if config.dry_run:
        print(config.model_dump_json(indent=2))
        return 0
    status = run(config)
    return status if isinstance(status, int) else 0


def _rl(args: list[str]) -> int:
    def run(config: RunConfig) -> None:
        from latepix.launcher import run_rl

        run_rl(config)

    return _configured(RunConfig, args, "rl", run)


def _sft(args: list[str]) -> int:
    def run(config: SftConfig) -> None:
        read_model_info(config.model.path)
        _quiet_transformers()
        from latepix.sft import run_sft

        run_sft(config)

    return _configured(SftConfig, args, "sft", run)


def _eval(args: list[str]) -> int:
    def run(config: RunConfig) -> None:
        from latepix.launcher import run_eval

        run_eval(config)

    return _configured(RunConfig, args, "eval", run)


def _serve(args: list[str]) -> int:
    def run(config: RunConfig) -> None:
        read_model_info(config.model.path)
        if config.inference.url is not None:
            raise ConfigError(f"inference.url: {config.inference.url} runs already; `serve` starts a server.")
        if config.inference.engine == "vllm":
            from latepix.inference.vllm import become_vllm

            become_vllm(config)
        _quiet_transformers()
        from latepix.serve import run_server

        run_server(config)

    return _configured(RunConfig, args, "serve", run)


def _orchestrate(args: list[str]) -> int:
    def run(config: RunConfig) -> None:
        from latepix.orchestrator.loop import run_orchestrator

        run_orchestrator(config)

    return _configured(RunConfig, args, "orchestrate", run)


def _train(args: list[str]) -> int:
    def run(config: RunConfig) -> None:
        read_model_info(config.model.path)
        _quiet_transformers()
        from latepix.trainer.loop import run_trainer

        run_trainer(config)

    return _configured(RunConfig, args, "train", run)


def _parity(args: list[str]) -> int:
    def run(config: ParityConfig) -> int:
        read_model_info(config.model.path)
        _quiet_transformers()
        from latepix.parity.kl import run_parity

        return run_parity(config)

    return _configured(ParityConfig, args, "parity", run)


def _doctor(args: list[str]) -> int:
    def run(config: DoctorConfig) -> int:
        read_model_info(config.model.path)
        _quiet_transformers()
        from latepix.parity.doctor import run_doctor

        return run_doctor(config)

    return _configured(DoctorConfig, args, "doctor", run)


def _budget(args: list[str]) -> int:
    def run(config: BudgetConfig) -> None:
        from latepix.budget import run_budget

        run_budget(config)

    return _configured(BudgetConfig, args, "budget", run)


def _replay(args: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="latepix replay",
        description="Play the quarantined rollouts of a run again and show their full errors.",
        epilog="Exit status: 0 if every one fails again for the same reason, 1 if one does not, 2 if it cannot replay.",
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--id", metavar="TRACE_ID", dest="trace_id", help="only this rollout, such as s3-g7-r2")
    parser.add_argument("--limit", metavar="N", type=_positive, help="only the first N")
    parser.add_argument(
        "--model", metavar="PATH", type=Path, help="default: RUN_DIR/model, or else the run's model.path"
    )
    parsed = parser.parse_args(args)
    from latepix.replay import run_replay

    try:
        return run_replay(parsed.run_dir, trace_id=parsed.trace_id, limit=parsed.limit, model=parsed.model)
    except LatepixError as error:
        # Status 1 says that an outcome differs, so it is not for errors here.
        print_error(error)
        return 2


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number above 0")
    return int(text)


def _report(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="latepix report", description="Write report.html into a run folder.")
    parser.add_argument("run_dir", type=Path)
    from latepix.report.html import write_report

    print(write_report(parser.parse_args(args).run_dir))
    return 0


def _tiny(args: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="latepix tiny", description="Write a tiny random model of the real class, with tokenizer and processor."
    )
    parser.add_argument("--family", required=True, help="model_type of the family, for example qwen3_vl")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("out", type=Path)
    parsed = parser.parse_args(args)
    _quiet_transformers()
    from latepix.families.tiny import make_tiny

    print(make_tiny(parsed.family, parsed.out, seed=parsed.seed))
    return 0


def _quiet_transformers() -> None:
    """Keep progress bars of half a second out of the logs."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    logging.disable_progress_bar()


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "rl": _rl,
    "sft": _sft,
    "eval": _eval,
    "serve": _serve,
    "orchestrate": _orchestrate,
    "train": _train,
    "parity": _parity,
    "doctor": _doctor,
    "budget": _budget,
    "replay": _replay,
    "report": _report,
    "tiny": _tiny,
}
