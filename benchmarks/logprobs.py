"""Peak memory of logprobs and entropies over a large vocabulary: `python benchmarks/logprobs.py`.

8,192 tokens, a vocabulary of 151,936 (Qwen3-VL's), 64 features, forward and backward, at several budgets
(`trainer.logits_bytes`). All logits would be 5 GB in float32, and plain autograd keeps several of that size. Each
budget runs in a process of its own; memory is the process's peak less what it had before the step.

The last line is one JSON object: `peak_gb` and `seconds` at the trainer's default budget, `peak_gb_by_budget`,
`logits_gb`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import torch

from latepix.config.schema import TrainStepConfig
from latepix.metrics import peak_rss_bytes
from latepix.trainer.logprobs import logprobs_and_entropies


def run_one(args: argparse.Namespace) -> dict[str, float]:
    """Measure one budget in this process."""
    torch.set_num_threads(args.threads)
    hidden = torch.randn(args.tokens, args.features, requires_grad=True)
    weight = torch.randn(args.vocabulary, args.features, requires_grad=True)
    targets = torch.randint(args.vocabulary, (args.tokens,))
    before, started = peak_rss_bytes(), time.monotonic()
    logprobs, entropies = logprobs_and_entropies(
        hidden, weight, targets, torch.ones(args.tokens), torch.tensor([7]), logits_bytes=args.budget
    )
    (logprobs.sum() + 0.1 * entropies.sum()).backward()
    return {"peak_gb": (peak_rss_bytes() - before) / 1e9, "seconds": time.monotonic() - started}


def main() -> None:
    """Measure the budgets, each in its process, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=int, help="measure this budget only, in bytes")
    args = parser.parse_args()
    if args.budget:
        print(json.dumps(run_one(args)))
        return
    default = TrainStepConfig().logits_bytes
    found = {}
    for budget in (default // 4, default, default * 4):
        command = [sys.executable, __file__, "--budget", str(budget)]
        for name in ("tokens", "vocabulary", "features", "threads"):
            command += [f"--{name}", str(getattr(args, name))]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[budget] = json.loads(done.stdout)
        print(f"budget {budget / 1e6:.0f} MB: {found[budget]['peak_gb']:.2f} GB, {found[budget]['seconds']:.1f} s")
    result = {
        "peak_gb": found[default]["peak_gb"],
        "seconds": found[default]["seconds"],
        "peak_gb_by_budget": {str(budget): values["peak_gb"] for budget, values in found.items()},
        "logits_gb": args.tokens * args.vocabulary * 4 / 1e9,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
