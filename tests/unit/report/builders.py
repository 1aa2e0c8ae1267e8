"""Run folders as a run leaves them, with real traces and drawn pictures."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image, ImageDraw

from latepix.metrics import MetricsWriter
from latepix.trace.graph import MessageNode, RolloutFailure, Trace
from latepix.trace.ingress import InlineImage, ingest_image
from latepix.trace.messages import TextPart, assistant_message, user_message
from latepix.trace.refs import PlaceholderRange
from latepix.trace.store import TraceWriter

IMAGE_TOKEN = 9


def draw_digit(digit: int, *, seed: int = 0, size: int = 32) -> InlineImage:
    """Draw a digit, thick and a little noisy, in `size` x `size` pixels."""
    rng = random.Random(seed * 10 + digit)
    picture = Image.new("L", (8, 12), 0)
    ImageDraw.Draw(picture).text((1, 0), str(digit), fill=255)
    angle = rng.uniform(-14, 14)
    picture = picture.resize((size * 3 // 4, size), Image.Resampling.BICUBIC).rotate(angle, Image.Resampling.BICUBIC)
    canvas = Image.new("L", (size, size), 0)
    canvas.paste(picture, (size // 8, 0))
    return ingest_image(canvas.convert("RGB"))


def make_trace(
    *,
    image: InlineImage,
    reply: str = "7",
    prompt: str = "Which digit is this? Answer with one digit.",
    answer: str = "7",
    step: int = 0,
    group_id: int = 0,
    rollout: int = 0,
    split: str = "train",
    reward: float | None = 1.0,
    advantage: float | None = 0.5,
    failure: RolloutFailure | None = None,
    logprobs: tuple[float, float] = (-0.105, -0.002),
    is_truncated: bool = False,
) -> Trace:
    """Build a rollout of one turn: a picture of 4 tokens and a question, then an answer of 2 tokens."""
    message = msgspec.structs.replace(
        user_message(image, "x"), content=(*user_message(image).content, TextPart(text=prompt))
    )
    ids = (1, 2, *(IMAGE_TOKEN,) * 4, 3, 4)
    nodes = (
        MessageNode(
            parent=None,
            message=message,
            token_ids=ids,
            mask=(False,) * len(ids),
            ranges=(PlaceholderRange(offset=2, length=4),),
        ),
        MessageNode(
            parent=0,
            message=assistant_message(reply),
            token_ids=(5, 6, 55, 7),
            mask=(False, False, True, True),
            logprobs=logprobs,
            policy_version=step,
            finish_reason="length" if is_truncated else "stop",
        ),
    )
    return msgspec.convert(
        {
            "id": f"s{step}-g{group_id}-r{rollout}",
            "environment": "digits",
            "task_id": f"{split}-{group_id:04d}",
            "step": step,
            "group_id": group_id,
            "split": split,
            "nodes": [msgspec.to_builtins(node) for node in nodes[:1]] if failure else msgspec.to_builtins(nodes),
            "reward": None if failure else reward,
            "advantage": None if failure or split != "train" else advantage,
            "failure": msgspec.to_builtins(failure) if failure else None,
            "answer": answer,
        },
        Trace,
    )


def make_run(run_dir: Path, *, num_steps: int = 12, num_groups: int = 3, group_size: int = 4, seed: int = 0) -> Path:
    """Write a finished run folder whose reward rises from about 0.5 to about 0.95."""
    rng = random.Random(seed)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.json").write_text(json.dumps(make_config(run_dir, num_steps)))
    _write_metrics(run_dir, num_steps, rng)
    traces = TraceWriter(run_dir)
    for step in range(num_steps):
        skill = _skill(step, num_steps)
        traces.write(f"step_{step:06d}", _step_traces(rng, step, num_groups, group_size, skill))
    for version in (0, num_steps):
        skill = _skill(version, num_steps)
        traces.write(f"eval_{version:06d}", _step_traces(rng, version, 4 * num_groups, 1, skill, split="validation"))
    write_quarantine(
        run_dir,
        [
            failed_trace(
                "too_many_pixels", "The picture is 9000 x 9000 = 81000000 pixels, the limit is 50000000.", step=1
            ),
            failed_trace(
                "inference_failed", "POST /inference/v1/generate: HTTP 503, server is loading weights.", step=3
            ),
            failed_trace("inference_failed", "POST /inference/v1/generate: timed out after 300 s.", step=5),
        ],
    )
    (run_dir / "summary.json").write_text(json.dumps(make_summary(num_steps)))
    return run_dir


def make_config(run_dir: Path, num_steps: int) -> dict[str, Any]:
    """Return resolved settings, the few that the report names."""
    return {
        "output_dir": str(run_dir),
        "model": {"path": "out/tiny-qwen3-vl", "dtype": "float32"},
        "seed": 0,
        "environment": {"type": "digits", "picture_px": 32, "blank_pictures": False},
        "steps": num_steps,
        "sampling": {"temperature": 1.0, "max_tokens": 4},
        "orchestrator": {"prompts_per_step": 16, "group_size": 8, "max_off_policy_steps": 0},
        "trainer": {"optim": {"lr": 0.0005, "betas": [0.9, 0.99]}},
    }


def make_summary(num_steps: int) -> dict[str, Any]:
    """Return the summary of a finished run."""
    return {
        "steps": num_steps,
        "reward_first": 0.523,
        "reward_last": 0.957,
        "eval_before": 0.548,
        "eval_after": 0.944,
        "mismatch_kl_mean": 1.23e-9,
        "mismatch_kl_max": 4.5e-7,
        "num_traces": 20480,
        "num_quarantined": 3,
        "wall_s": 187.3,
        "samples_per_s": 211.4,
        "wire_bytes_per_sample": 312.4,
        "peak_rss_bytes": 1_834_000_000,
    }


def failed_trace(reason: str, message: str, *, step: int = 0) -> Trace:
    """Build a rollout that failed before its answer."""
    return make_trace(
        image=draw_digit(3), step=step, group_id=step, failure=RolloutFailure(reason, message), answer="3"
    )


def write_quarantine(run_dir: Path, traces: list[Trace]) -> None:
    """Append failed traces as a run does: the form of a trace file, one line each."""
    path = TraceWriter(run_dir).write("quarantine", traces)
    with (run_dir / "quarantine.jsonl").open("ab") as file:
        file.write(path.read_bytes())
    path.unlink()


def _skill(step: int, num_steps: int) -> float:
    return 0.95 - 0.45 * math.exp(-4 * step / num_steps)


def _step_traces(
    rng: random.Random, step: int, num_groups: int, group_size: int, skill: float, split: str = "train"
) -> list[Trace]:
    traces = []
    for group_id in range(num_groups):
        digit = rng.randrange(10)
        image = draw_digit(digit, seed=rng.randrange(1000))
        replies = [digit if rng.random() < skill else rng.randrange(10) for _ in range(group_size)]
        rewards = [float(reply == digit) for reply in replies]
        mean = sum(rewards) / group_size
        std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / group_size)
        for rollout, (reply, reward) in enumerate(zip(replies, rewards, strict=True)):
            traces.append(
                make_trace(
                    image=image,
                    reply=str(reply),
                    answer=str(digit),
                    step=step,
                    group_id=group_id,
                    rollout=rollout,
                    split=split,
                    reward=reward,
                    advantage=(reward - mean) / std if std else 0.0,
                    logprobs=(math.log(rng.uniform(0.5, 1) if reward else rng.uniform(0.05, 0.5)), -0.002),
                    is_truncated=rng.random() < 0.03,
                )
            )
    return traces


def _write_metrics(run_dir: Path, num_steps: int, rng: random.Random) -> None:
    writer = MetricsWriter(run_dir / "metrics.jsonl")
    for step in range(num_steps):
        skill = _skill(step, num_steps)
        if step % max(1, num_steps // 8) == 0:
            writer.write(step, {"eval/reward/mean": skill + rng.gauss(0, 0.008)})
        writer.write(step, _rollout_metrics(rng, skill, step, num_steps))
        writer.write(step, _trainer_metrics(rng, step, num_steps))
    writer.write(num_steps, {"eval/reward/mean": 0.944})
    writer.close()


def _rollout_metrics(rng: random.Random, skill: float, step: int, num_steps: int) -> dict[str, float]:
    return {
        "rollout/reward/mean": min(1.0, skill + rng.gauss(0, 0.035)),
        "rollout/reward/std": rng.uniform(0.2, 0.4),
        "rollout/zero_spread_groups/frac": min(1, 0.25 + 0.55 * step / num_steps + rng.gauss(0, 0.05)),
        "rollout/truncated/frac": abs(rng.gauss(0.03, 0.02)),
        "rollout/failed/count": float(step in (1, 3, 5)),
        "rollout/prompt_tokens/mean": 31.0,
        "rollout/completion_tokens/mean": 2 + abs(rng.gauss(0.1, 0.05)),
        "batch/bytes_per_sample": 312 + rng.gauss(0, 4),
        "batch/samples/count": 128,
        "time/generate_s": 0.31 + abs(rng.gauss(0, 0.04)),
        "time/pack_s": 0.02,
        "time/wait_weights_s": 0.28 + abs(rng.gauss(0, 0.03)),
        "process/orchestrator/peak_rss_bytes": 210e6,
        "process/inference/peak_rss_bytes": 690e6,
    }


def _trainer_metrics(rng: random.Random, step: int, num_steps: int) -> dict[str, float]:
    return {
        "loss/total": rng.gauss(0, 0.01),
        "loss/entropy/mean": 0.18 + 0.9 * math.exp(-3 * step / num_steps) + rng.gauss(0, 0.02),
        "loss/mismatch_kl/mean": 1e-9 * math.exp(rng.gauss(0, 0.6)),
        "loss/mismatch_kl/max": 3e-7 * math.exp(rng.gauss(0, 1.0)),
        "loss/importance_ratio/mean": 1 + rng.gauss(0, 2e-5),
        "loss/importance_ratio/max": 1.0004 + abs(rng.gauss(0, 2e-4)),
        "loss/clipped/frac": abs(rng.gauss(0.01, 0.005)),
        "optim/grad_norm": 0.6 + abs(rng.gauss(0.2, 0.3)),
        "optim/lr": 5e-4,
        "time/wait_batch_s": 0.33 + abs(rng.gauss(0, 0.03)),
        "time/materialize_s": 0.03 + abs(rng.gauss(0, 0.005)),
        "time/train_s": 0.22 + abs(rng.gauss(0, 0.02)),
        "time/publish_s": 0.03 + abs(rng.gauss(0, 0.005)),
        "time/step_s": 0.62,
        "perf/samples_per_s": 205 + rng.gauss(0, 12),
        "process/trainer/peak_rss_bytes": 934e6,
    }
