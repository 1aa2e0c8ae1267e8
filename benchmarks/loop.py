"""Samples per second of the whole RL loop, training included: `python benchmarks/loop.py`.

Runs `latepix rl` on `digits` with a random tiny Qwen3-VL (which seldom ends its turn, so nearly every answer has all
its tokens) and reads the step times of the run, warm-up steps left out. Each setting is a run of its own: strictly
on-policy, and one step off-policy, where sampling and training overlap.

The last line is one JSON object: `samples_per_s` (the faster setting), `samples_per_s_on_policy`,
`samples_per_s_off_policy`, `wire_bytes_per_sample`, `peak_rss_bytes` (sum over the three processes),
`mismatch_kl_max`, and, with `--peer PYTHON`, `peer_samples_per_s` and `ratio`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from latepix.metrics import read_metrics

_HERE = Path(__file__).parent


def measure(model: Path, out: Path, *, off_policy_steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run the loop once and return what it came to."""
    settings = {
        "output_dir": out,
        "steps": args.steps,
        "model.path": model,
        "environment.picture_px": args.picture_px,
        "sampling.max_tokens": args.new_tokens,
        "orchestrator.prompts_per_step": args.samples // args.group_size,
        "orchestrator.group_size": args.group_size,
        "orchestrator.max_off_policy_steps": off_policy_steps,
        "trainer.optim.lr": 1e-5,
        "eval.every_steps": 0,
        "eval.num_tasks": 8,
    }
    command = [sys.executable, "-m", "latepix", "rl"]
    for key, value in settings.items():
        command += [f"--{key}", str(value)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [row for row in read_metrics(out / "metrics.jsonl") if args.warmup <= row["step"] < args.steps]
    summary = json.loads((out / "summary.json").read_text())
    seconds = sum(row["time/step_s"] for row in rows)
    return {
        "samples_per_s": sum(row["batch/samples/count"] for row in rows) / seconds,
        "new_tokens": sum(row["rollout/completion_tokens/mean"] for row in rows) / len(rows),
        "generate_s": sum(row["time/generate_s"] for row in rows) / len(rows),
        "train_s": sum(row["time/train_s"] for row in rows) / len(rows),
        "step_s": seconds / len(rows),
        "wire_bytes_per_sample": summary["wire_bytes_per_sample"],
        "peak_rss_bytes": sum(summary["peak_rss_bytes"].values()),
        "mismatch_kl_max": max(row["loss/mismatch_kl/mean"] for row in rows),
    }


def measure_peer(python: Path, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run the same work in TRL, in the environment of `python`."""
    command = [str(python), str(_HERE / "peer_trl.py"), str(model)]
    for key in ("samples", "group_size", "picture_px", "new_tokens", "steps", "warmup"):
        command += [f"--{key.replace('_', '-')}", str(getattr(args, key))]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.strip().splitlines()[-1])


def main() -> None:
    """Measure, print a table, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: a new tiny one")
    parser.add_argument("--samples", type=int, default=64, help="samples in one step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--picture-px", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=10, help="first steps that are not counted")
    parser.add_argument("--peer", type=Path, help="python of an environment with TRL, to measure beside")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder) / "tiny"
        if args.model is None:
            subprocess.run(
                [sys.executable, "-m", "latepix", "tiny", "--family", "qwen3_vl", str(model)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
        results = {
            name: measure(model, Path(folder) / name, off_policy_steps=steps, args=args)
            for name, steps in (("on_policy", 0), ("off_policy", 1))
        }
        peer = measure_peer(args.peer, model, args) if args.peer else None
    print(f"{'':12}{'samples/s':>10}{'step s':>9}{'generate s':>12}{'train s':>9}{'tokens':>8}")
    for name, result in results.items():
        print(
            f"{name:12}{result['samples_per_s']:10.1f}{result['step_s']:9.3f}{result['generate_s']:12.3f}"
            f"{result['train_s']:9.3f}{result['new_tokens']:8.1f}"
        )
    line: dict[str, Any] = {
        "samples_per_s": max(result["samples_per_s"] for result in results.values()),
        "samples_per_s_on_policy": results["on_policy"]["samples_per_s"],
        "samples_per_s_off_policy": results["off_policy"]["samples_per_s"],
        "wire_bytes_per_sample": results["on_policy"]["wire_bytes_per_sample"],
        "peak_rss_bytes": max(result["peak_rss_bytes"] for result in results.values()),
        "mismatch_kl_max": results["on_policy"]["mismatch_kl_max"],
    }
    if peer:
        print(f"{'TRL':12}{peer['samples_per_s']:10.1f}{peer['step_s']:9.3f}")
        line |= {
            "peer_samples_per_s": peer["samples_per_s"],
            "ratio": line["samples_per_s"] / peer["samples_per_s"],
        }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
