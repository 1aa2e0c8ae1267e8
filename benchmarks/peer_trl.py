"""The same RL work in TRL's `GRPOTrainer`: `TRL_PYTHON benchmarks/peer_trl.py MODEL`.

Runs in an environment of its own (trl, datasets, scikit-learn, torchvision) and imports nothing of latepix. Any Hugging
Face folder of a vision-language model will do. Prints one JSON line: `samples_per_s`, `step_s` (warm steps only, mean),
`num_threads`, `trl`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _dataset(num_rows: int, picture_px: int) -> Any:
    import numpy as np
    from datasets import Dataset  # ty: ignore[import-not-found]  an environment of its own has it
    from PIL import Image
    from sklearn.datasets import load_digits

    data = load_digits()
    rows = []
    for index in range(num_rows):
        grey = np.round(data.images[index] * (255 / 16)).astype(np.uint8)
        picture = Image.fromarray(grey).resize((picture_px, picture_px), Image.Resampling.NEAREST).convert("RGB")
        prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "which digit?"}]}]
        rows.append({"prompt": prompt, "image": picture, "answer": str(data.target[index])})
    return Dataset.from_list(rows)


def _make_torchvision_importable() -> Any:
    """Declare the operators that torchvision lacks beside a CPU build of torch; returns what keeps them alive."""
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        import sys

        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


def _reward(completions: list[Any], answer: list[str], **unused: Any) -> list[float]:
    return [
        float(completion[0]["content"].strip() == expected)
        for completion, expected in zip(completions, answer, strict=True)
    ]


def main() -> None:
    """Train a few steps and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--picture-px", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--threads", type=int, default=0, help="0 leaves torch's own choice")
    args = parser.parse_args()

    import torch

    declared = _make_torchvision_importable()
    import trl  # ty: ignore[import-not-found]  an environment of its own has it
    from transformers import TrainerCallback

    if args.threads:
        torch.set_num_threads(args.threads)

    class StepTimes(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *unused: Any, **also_unused: Any) -> None:
            self.ends.append(time.monotonic())

    times = StepTimes()
    with tempfile.TemporaryDirectory() as out:
        config = trl.GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=args.samples,
            num_generations=args.group_size,
            max_completion_length=args.new_tokens,
            max_steps=args.steps,
            learning_rate=1e-5,
            beta=0.0,
            temperature=1.0,
            report_to=[],
            save_strategy="no",
            logging_steps=args.steps,
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
        )
        trainer = trl.GRPOTrainer(
            model=args.model,
            reward_funcs=_reward,
            args=config,
            train_dataset=_dataset(args.steps * args.samples // args.group_size, args.picture_px),
            callbacks=[times],
        )
        trainer.train()
        del declared
    warm = times.ends[args.warmup - 1 :]
    step_s = (warm[-1] - warm[0]) / (len(warm) - 1)
    result = {
        "samples_per_s": args.samples / step_s,
        "step_s": step_s,
        "num_threads": torch.get_num_threads(),
        "trl": trl.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
