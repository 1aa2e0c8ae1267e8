"""The README's demo: tiny model -> supervised warm start -> RL on real handwriting. Run it with `make demo`."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

_HERE = Path(__file__).parent


def main() -> int:
    """Run the three commands a person would type; returns the exit status of the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of weights, tasks and sampling")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder; replaced if it is there")
    parser.add_argument("extra", nargs="*", help="passed on to `latepix rl`, after --")
    args = parser.parse_args()
    started = time.monotonic()
    shutil.rmtree(args.out, ignore_errors=True)
    tiny, sft, rl = args.out / "tiny", args.out / "sft", args.out / "rl"
    seed = ["--seed", str(args.seed)]
    run = ["--model.path", str(sft / "model"), "--output_dir", str(rl)]
    commands = [
        ["tiny", "--family", "qwen3_vl", *seed, str(tiny)],
        ["sft", "@", str(_HERE / "sft.toml"), "--model.path", str(tiny), "--output_dir", str(sft), *seed],
        ["rl", "@", str(_HERE / "run.toml"), *run, *seed, *args.extra],
    ]
    for command in commands:
        print(f"$ latepix {' '.join(command)}", flush=True)
        status = subprocess.run([sys.executable, "-m", "latepix", *command], check=False).returncode
        if status:
            return status
    print(f"demo: {time.monotonic() - started:.0f} s in all, seed {args.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
