"""Every family in numbers: `make families` writes the first table of docs/families.md, `make families-vllm` the second.

For each family a tiny checkpoint, float32, on the CPU. With two pictures per prompt (`digit-sum`), after a short warm
start: `latepix parity` (20 steps x 64 rollouts, weights updated before each), 16 samples together against one by one,
and what grey pictures change. With one (`digits`): reward over a short run of RL, after a supervised warm start. With
`--vllm`, parity through a real vLLM instead. A family that misses a limit ends the script with status 1, after the
table.

The last line is one JSON object of the rows.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from latepix.families.tiny import TINY_FAMILIES
from latepix.metrics import read_metrics

_DOC = Path(__file__).parent.parent / "docs" / "families.md"
_SFT_STEPS, _RL_STEPS, _EDGE = 100, 80, 10
#: What the mean mismatch KL of every step, and the difference of packed samples, stay below.
_MAX_KL = {"local": 1e-5, "vllm": 1e-6}
_MAX_PACKED = 1e-5


def latepix(*arguments: object) -> None:
    """Run a command of latepix; its log is shown only if it fails."""
    command = [sys.executable, "-m", "latepix", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")


def parity(model: Path, out: Path, *extra: object) -> dict[str, Any]:
    """Run `latepix parity`; returns the mean mismatch KL over steps and of the worst step, and the updates shown."""
    # A learning rate at which every update can be told from the one before.
    latepix("parity", "--model.path", model, "--output_dir", out, "--trainer.optim.lr", 1e-3, *extra)
    report = json.loads((out / "parity.json").read_text())
    means = [step["agreement"]["mismatch_kl_mean"] for step in report["steps"]]
    return {
        "steps": len(means),
        "kl_mean": float(np.mean(means)),
        "kl_worst_step": max(means),
        "updates": report["num_updates_shown"],
        "entropy": float(np.mean([step["entropy_mean"] for step in report["steps"]])),
    }


def make_warm(family: str, folder: Path) -> Path:
    """Make a tiny model and teach it `digit-sum` a little: a random one is so near to uniform that all would agree."""
    latepix("tiny", "--family", family, folder / "model")
    warm = ("--trainer.optim.lr", 1.5e-3, "--trainer.optim.warmup_steps", 5, "--environment.type", "digit-sum")
    latepix("sft", "--model.path", folder / "model", "--output_dir", folder / "warm", "--steps", _SFT_STEPS, *warm)
    return folder / "warm" / "model"


def in_process(warm: Path, learned: Path) -> dict[str, Any]:
    """Measure `digit-sum` demonstrations: packing with the warm model, grey pictures with one that reads."""
    from latepix.config.schema import EnvironmentConfig, ImagesConfig, ModelConfig, TrainerConfig
    from latepix.environments.base import load_environment
    from latepix.inference.render import MessageRenderer
    from latepix.runs import picture_door
    from latepix.sft import demonstration_sample
    from latepix.trace.training import TrainingSample, pack_samples
    from latepix.trainer.loss import cross_entropy
    from latepix.trainer.step import TrainStep

    def load(model: Path, layout: str) -> TrainStep:
        config = TrainerConfig.model_validate({"layout": layout})
        return TrainStep(ModelConfig(path=model), config, loss=cross_entropy, total_steps=1)

    def samples(step: TrainStep, *, blank: bool) -> list[TrainingSample]:
        config = EnvironmentConfig(type="digit-sum", blank_pictures=blank)
        environment = load_environment(config, picture_door(ImagesConfig(), step.info))
        renderer, rng = MessageRenderer(step.info), np.random.default_rng(0)
        return [demonstration_sample(environment, renderer, index, rng) for index in range(16)]

    def one_by_one(step: TrainStep, *, blank: bool) -> np.ndarray:
        measured = [step.measure(pack_samples([sample])) for sample in samples(step, blank=blank)]
        return np.concatenate([outputs.trainer_logprobs.numpy() for outputs in measured])

    differences = {}
    first = load(warm, "auto")
    for layout in first.adapter.forward_policy.layouts:
        step = load(warm, layout)
        together = step.measure(pack_samples(samples(step, blank=False))).trainer_logprobs.numpy()
        differences[layout] = float(np.abs(together - one_by_one(first, blank=False)).max())
        step.close()
    reader = load(learned, "auto")
    seeing, blind = one_by_one(reader, blank=False), one_by_one(reader, blank=True)
    num_parameters = sum(parameter.numel() for parameter in first.model.parameters())
    first.close()
    reader.close()
    return {
        "num_parameters": num_parameters,
        "packed_difference": max(differences.values()),
        "layouts": " ".join(differences),
        "blank_difference": float(np.abs(seeing - blind).mean()),
    }


def learn(model: Path, out: Path) -> dict[str, float]:
    """Warm up and run RL on `digits`; returns the mean reward of the first and last ten steps, with standard errors."""
    warm = ("--trainer.optim.warmup_steps", 5)
    latepix("sft", "--model.path", model, "--output_dir", out / "sft", "--steps", _SFT_STEPS, "--batch_size", 32,
            "--environment.num_demonstrations", 20, "--environment.demonstration_noise", 0.2,
            "--trainer.optim.lr", 1.5e-3, *warm)  # fmt: skip
    latepix("rl", "--model.path", out / "sft" / "model", "--output_dir", out / "rl", "--steps", _RL_STEPS,
            "--sampling.max_tokens", 2, "--orchestrator.prompts_per_step", 24, "--trainer.optim.lr", 7e-4, *warm,
            "--trainer.loss.entropy_bonus", 0.05, "--eval.every_steps", 0, "--eval.num_tasks", 8)  # fmt: skip
    rows = read_metrics(out / "rl" / "metrics.jsonl")
    rewards = [row["rollout/reward/mean"] for row in rows if "rollout/reward/mean" in row][:_RL_STEPS]
    kl = [row["loss/mismatch_kl/mean"] for row in rows if "loss/mismatch_kl/mean" in row]
    found: dict[str, float] = {"rl_kl_max": max(kl)}
    for name, part in (("first", rewards[:_EDGE]), ("last", rewards[-_EDGE:])):
        found[f"reward_{name}"] = float(np.mean(part))
        found[f"reward_{name}_error"] = float(np.std(part, ddof=1) / math.sqrt(len(part)))
    return found


def local_row(family: str, folder: Path) -> dict[str, Any]:
    """Measure one family with the local engine."""
    warm = make_warm(family, folder)
    found = parity(warm, folder / "parity") | learn(folder / "model", folder)
    return found | in_process(warm, folder / "rl" / "model")


def vllm_row(family: str, folder: Path, python: Path) -> dict[str, Any]:
    """Measure one family with vLLM."""
    warm = make_warm(family, folder)
    extra = ["--inference.engine", "vllm", "--inference.vllm.python", python.absolute()]
    return parity(warm, folder / "parity", *extra)


def misses(row: dict[str, Any], engine: str) -> list[str]:
    """Return what a row should not be."""
    problems = []
    if not row["kl_worst_step"] < _MAX_KL[engine]:
        problems.append(f"KL {row['kl_worst_step']:.2g}, wanted below {_MAX_KL[engine]:g}")
    if row["updates"] < row["steps"] - 1:
        problems.append(f"only {row['updates']} of {row['steps'] - 1} updates were seen to be served")
    if engine == "local":
        if not row["packed_difference"] < _MAX_PACKED:
            problems.append(f"packed differs by {row['packed_difference']:.2g}, wanted below {_MAX_PACKED:g}")
        if not row["blank_difference"] > 0.05:
            problems.append(f"grey pictures change {row['blank_difference']:.2g}, wanted above 0.05")
        error = math.hypot(row["reward_first_error"], row["reward_last_error"])
        if not row["reward_last"] - row["reward_first"] > 3 * error:
            problems.append(f"reward {row['reward_first']:.3f} -> {row['reward_last']:.3f}, wanted a rise of 3 errors")
    return problems


def local_table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the first table in Markdown."""
    lines = [
        "| family | parameters | layouts | mismatch KL, mean / worst step | packed or padded - single | grey pictures "
        "| reward, first / last 10 of 80 steps |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| `{family}` | {row['num_parameters'] / 1e6:.2f} M | {row['layouts']} | {row['kl_mean']:.1e} / "
        f"{row['kl_worst_step']:.1e} | {row['packed_difference']:.1e} | {row['blank_difference']:.3f} | "
        f"{row['reward_first']:.3f} ± {row['reward_first_error']:.3f} / {row['reward_last']:.3f} ± "
        f"{row['reward_last_error']:.3f} |"
        for family, row in rows.items()
    ]
    return "\n".join(lines)


def vllm_table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the second table in Markdown."""
    lines = [
        "| family | mismatch KL, mean / worst step | entropy, nats | updates shown to be served |",
        "| --- | ---: | ---: | ---: |",
    ]
    for family, row in rows.items():
        kl = f"{row['kl_mean']:.1e} / {row['kl_worst_step']:.1e}"
        updates = f"{row['updates']} of {row['steps'] - 1}"
        lines.append(f"| `{family}` | {kl} | {row['entropy']:.2f} | {updates} |")
    return "\n".join(lines)


def write_table(engine: str, table: str) -> None:
    """Replace the table between its two marks in the document."""
    begin, end = f"<!-- table: {engine} -->", f"<!-- end: {engine} -->"
    before, _, rest = _DOC.read_text().partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise SystemExit(f"{_DOC} lacks {begin} ... {end}")
    _DOC.write_text(f"{before}{begin}\n{table}\n{end}{after}")


def main() -> int:
    """Measure, write the table, print the JSON line; returns 1 if a family missed a limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=TINY_FAMILIES, help="left out: all, and the table is written")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="of the environment that vLLM is installed in")
    args = parser.parse_args()
    engine = "vllm" if args.vllm else "local"
    rows: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for family in args.families or TINY_FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            rows[family] = vllm_row(family, place, args.vllm) if args.vllm else local_row(family, place)
        print(family, rows[family], flush=True)
        problems += [f"{family}: {problem}" for problem in misses(rows[family], engine)]
    if not args.families:
        write_table(engine, (vllm_table if args.vllm else local_table)(rows))
    for problem in problems:
        print(problem, file=sys.stderr)
    print(msgspec.json.encode(rows).decode())
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
