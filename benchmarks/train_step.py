"""One full training step, each distinct picture encoded once or once per sample: `python benchmarks/train_step.py`.

64 samples (8 prompts x 8 rollouts) of one 512 x 512 picture (256 tokens), 16 text and 16 sampled tokens each; a
Qwen3-VL of 6 M parameters (text 256 x 4 layers, vision 128 x 4), float32, sdpa. A step is everything `TrainStep.run`
does: decode, process, forward, backward, AdamW. Both ways are ours and differ in nothing but how often a picture goes
through the vision tower; each runs in a process of its own, for its peak memory. With `--peer PYTHON`, TRL's
`GRPOTrainer` steps on the same model folder (its generation included, which ours is not).

The last line is one JSON object: `plain_s`, `image_once_s` (best of the steps), `ratio`, `peak_gb_plain`,
`peak_gb_image_once` (resident, whole process), `loss_difference`, `stages_plain`, `stages_image_once` (seconds of the
last step) and, with a peer, `trl_step_s`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from latepix.config.schema import ModelConfig, TrainerConfig
from latepix.families.tiny import make_tiny
from latepix.families.tiny_configs import TinySize
from latepix.metrics import peak_rss_bytes
from latepix.orchestrator.batch import prepare_batch
from latepix.trace.ingress import InlineImage, ingest_image
from latepix.trace.refs import MMRefs
from latepix.trace.training import Batch, MicroBatch, TrainingSample

_SIZE = TinySize(
    hidden=256,
    layers=4,
    heads=8,
    kv_heads=4,
    intermediate=1024,
    vision_hidden=128,
    vision_depth=4,
    vision_intermediate=512,
    vocab_tokens=1024,
)
_NUM_TEXT, _NUM_SAMPLED = 16, 16


def picture(seed: int, side: int) -> InlineImage:
    """Draw a picture of random blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
    return ingest_image(blocks.repeat(8, axis=0).repeat(8, axis=1))


def make_batch(info: Any, args: argparse.Namespace) -> Batch:
    """Make the samples of one step."""
    rng = np.random.default_rng(0)
    samples = []
    for prompt in range(args.prompts):
        image = picture(prompt, args.picture_px)
        num_image = info.num_image_tokens(image)
        text = rng.integers(0, 300, _NUM_TEXT)
        for _ in range(args.group_size):
            ids = np.concatenate([[info.image_placeholder_id] * num_image, text, rng.integers(0, 300, _NUM_SAMPLED)])
            mask = np.arange(len(ids)) >= len(ids) - _NUM_SAMPLED
            samples.append(
                TrainingSample(
                    token_ids=ids.astype(np.int32),
                    loss_mask=mask,
                    inference_logprobs=np.where(mask, -7.0, 0.0).astype(np.float32),
                    advantages=np.where(mask, rng.choice([-1.0, 1.0]), 0.0).astype(np.float32),
                    mm_refs=MMRefs.from_slots([(image, 0, num_image)]),
                    group_id=prompt,
                )
            )
    (batch,) = prepare_batch(samples, step=0, micro_batch_tokens=args.micro_batch_tokens)
    return batch


def run_one(args: argparse.Namespace) -> dict[str, Any]:
    """Take the steps of one way in this process."""
    from latepix.config.losses import LossConfig
    from latepix.trainer.loss_choice import loss_of
    from latepix.trainer.materialize import Materializer, MMInputs
    from latepix.trainer.step import TrainStep

    class OncePerSlot(Materializer):
        """Gives every slot a picture of its own, as a trainer without references does."""

        def run(self, micro_batches: Sequence[MicroBatch]) -> Iterator[MMInputs]:
            for inputs in super().run(micro_batches):
                images = tuple(inputs.images[index] for index in inputs.slot_images)
                yield MMInputs(images=images, slot_images=tuple(range(len(images))))

    config = TrainerConfig(num_threads=args.threads)
    step = TrainStep(ModelConfig(path=args.model), config, loss=loss_of(LossConfig()), total_steps=args.steps)
    if args.one == "plain":
        step.materializer = OncePerSlot(
            step.adapter, step.adapter.load_processor(args.model), cache_bytes=config.image_cache_bytes
        )
    stages: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            started = time.monotonic()
            result = function(*positional, **named)
            stages[name] = stages.get(name, 0.0) + time.monotonic() - started
            return result

        return call

    adapter: Any = step.adapter
    adapter.encode_images = timed("vision_forward", adapter.encode_images)
    adapter.forward_hidden = timed("text_forward", adapter.forward_hidden)
    batch = make_batch(step.info, args)
    seconds, losses, values = [], [], {}
    for _ in range(args.steps):
        stages.clear()
        started = time.monotonic()
        values = step.run(batch).values
        seconds.append(time.monotonic() - started)
        losses.append(values["loss/total"])
    stages["wait_pixels"] = values["time/wait_pixels_s"]
    stages["logprobs, backward and optimizer"] = seconds[-1] - sum(stages.values())
    step.close()
    return {
        "s": min(seconds),
        "peak_gb": peak_rss_bytes() / 1e9,
        "loss": losses[0],
        "num_parameters": sum(parameter.numel() for parameter in step.model.parameters()),
        "stages": {name: round(value, 3) for name, value in stages.items()},
    }


def main() -> None:
    """Run both ways, each in its process, and print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--picture-px", type=int, default=512)
    parser.add_argument("--micro-batch-tokens", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", help="Python of an environment with TRL")
    parser.add_argument("--model", type=Path, help="a model folder; left out, one is made")
    parser.add_argument("--one", choices=("plain", "image_once"), help="take one way's steps in this process")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run_one(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.model = args.model or make_tiny("qwen3_vl", Path(folder) / "model", size=_SIZE)
        found = {way: run_apart(way, args) for way in ("plain", "image_once")}
        plain, once = found["plain"], found["image_once"]
        for way, result in found.items():
            print(f"{way}: {result['s']:.2f} s, {result['peak_gb']:.2f} GB, {result['stages']}")
        result = {
            "plain_s": plain["s"],
            "image_once_s": once["s"],
            "ratio": plain["s"] / once["s"],
            "peak_gb_plain": plain["peak_gb"],
            "peak_gb_image_once": once["peak_gb"],
            "loss_difference": abs(plain["loss"] - once["loss"]),
            "num_parameters": once["num_parameters"],
            "stages_plain": plain["stages"],
            "stages_image_once": once["stages"],
        }
        if args.peer:
            result["trl_step_s"] = peer_step(args)
    print(json.dumps(result))


def run_apart(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Take one way's steps in a process of its own."""
    command = [sys.executable, __file__, "--one", way, "--model", str(args.model)]
    for name in ("prompts", "group_size", "picture_px", "micro_batch_tokens", "steps", "threads"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def peer_step(args: argparse.Namespace) -> float:
    """Return the seconds of a warm step of TRL on the same model folder."""
    command = [
        args.peer,
        str(Path(__file__).with_name("peer_trl.py")),
        str(args.model),
        "--steps",
        "3",
        "--warmup",
        "1",
    ]
    command += ["--samples", str(args.prompts * args.group_size), "--group-size", str(args.group_size)]
    command += ["--picture-px", str(args.picture_px), "--new-tokens", str(_NUM_SAMPLED), "--threads", str(args.threads)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])["step_s"]


if __name__ == "__main__":
    main()
