"""A thousand malformed rollouts of every kind, mixed into as many good ones, through the real orchestrator and HTTP."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from latepix.config.schema import (
    EnvironmentConfig,
    ImagesConfig,
    InferenceConfig,
    ModelConfig,
    OrchestratorConfig,
    RunConfig,
)
from latepix.environments.base import Environment, Ingest, Policy, Score, Split, Task
from latepix.families.model_info import ModelInfo, read_model_info
from latepix.inference.render import MessageRenderer
from latepix.orchestrator.loop import Orchestrator
from latepix.trace.messages import Message, user_message
from latepix.trace.refs import expand_placeholders
from tests.tiny.pictures import data_url, draw_flat, draw_picture, encode
from tests.tiny.servers import ScriptedServer

NUM_STEPS, PROMPTS, GROUP = 200, 5, 2
#: What goes wrong, and the reason it must be quarantined for.
KINDS = {
    "task raises": "environment_raised",
    "rollout raises": "environment_raised",
    "nan reward": "environment_raised",
    "no picture": "not_an_image",
    "cut picture": "truncated",
    "loose base64": "bad_base64",
    "large picture": "too_many_pixels",
    "large file": "too_many_bytes",
    "thin picture": "aspect_ratio",
    "many pictures": "too_many_images",
    "server error": "inference_failed",
    "refusal": "inference_failed",
    "no json": "inference_failed",
    "no ids": "inference_failed",
    "no ranges": "inference_failed",
    "other logprobs": "inference_failed",
    "positive logprob": "inference_failed",
    "shifted range": "placeholder_mismatch",
    "long picture": "placeholder_mismatch",
    "changed text": "placeholder_mismatch",
    "sampled picture": "placeholder_mismatch",
}
GOOD_PICTURE = encode(draw_picture(seed=0))
BAD_PICTURES: dict[str, Any] = {
    "no picture": b"<html>not found</html>",
    "cut picture": GOOD_PICTURE[: len(GOOD_PICTURE) // 2],
    "loose base64": data_url(GOOD_PICTURE)[:-4] + "-_==",
    "large picture": encode(draw_flat(color="red", width=400, height=300)),
    "large file": GOOD_PICTURE + bytes(60_000),
    "thin picture": encode(draw_picture(width=60, height=1)),
}


class Malformed(Environment):
    """Every second task goes wrong, in one way after another."""

    name = "malformed"

    def __init__(self, config: EnvironmentConfig, ingest: Ingest) -> None:
        super().__init__(config, ingest)
        self.kinds = list(KINDS)

    def num_tasks(self, split: Split) -> int:
        return NUM_STEPS * PROMPTS

    def kind(self, index: int) -> str:
        return "good" if index % 2 else self.kinds[index // 2 % len(self.kinds)]

    def task(self, split: Split, index: int) -> Task:
        kind = self.kind(index)
        if kind == "task raises":
            raise LookupError("no such task")
        picture = self.ingest(BAD_PICTURES.get(kind, GOOD_PICTURE))
        pictures = [picture] * (9 if kind == "many pictures" else 2)
        return Task(id=f"{kind}-{index}", messages=(user_message(*pictures, f"{index}: {kind}"),), answer="7")

    async def rollout(self, task: Task, policy: Policy) -> Score:
        kind = task.id.rpartition("-")[0]
        if kind == "rollout raises":
            raise ZeroDivisionError("the simulator is out of order")
        answer = await policy.respond(task.messages)
        return Score(reward=float("nan")) if kind == "nan reward" else self.score(task, answer)

    def score(self, task: Task, answer: Message) -> Score:
        return Score(reward=float(answer.text == task.answer))


class WrongServer:
    """Answers like the engine would, except where the prompt says how to be wrong."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._renderer = MessageRenderer(info)

    def __call__(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path != "/inference/v1/generate":
            return 200, {"status": "ok"}
        text = self._renderer.tokenizer.decode(body["token_ids"])
        kind = text.rpartition(": ")[2].partition("<|im_end|>")[0]
        sampled = self._renderer.answer_ids("7")
        ids, ranges = expand_placeholders(body["token_ids"], [1] * len(body["content_parts"]), (self._picture_id,))
        placed = [{"offset": r.offset, "length": r.length} for r in ranges]
        logprobs = [{"token_id": token, "logprob": -0.5} for token in sampled]
        if kind in ("server error", "refusal"):
            return {"server error": 500, "refusal": 400}[kind], {"error": {"message": "out of memory"}}
        if kind == "no json":
            return 200, b"<html>"
        if kind == "shifted range":
            placed[1]["offset"] += 1
        elif kind == "long picture":
            ids.insert(placed[1]["offset"], self._picture_id)
            placed[1]["length"] = 2
        elif kind == "changed text":
            ids[-1] += 1
        elif kind == "sampled picture":
            sampled[0] = logprobs[0]["token_id"] = self._picture_id
        elif kind == "other logprobs":
            logprobs[0]["token_id"] += 1
        elif kind == "positive logprob":
            logprobs[0]["logprob"] = 0.5
        choice = {"token_ids": sampled, "logprobs": {"content": logprobs}, "finish_reason": "stop"}
        return 200, {
            "request_id": "r",
            "choices": [{"index": index, **choice} for index in range(body["sampling_params"].get("n", 1))],
            "prompt_token_ids": None if kind == "no ids" else ids,
            "mm_placeholders": {} if kind == "no ranges" else {"image": placed},
        }

    @property
    def _picture_id(self) -> int:
        return self._info.image_placeholder_id


@pytest.fixture
def played(tiny_model: Path, tmp_path: Path) -> Generator[tuple[Orchestrator, ScriptedServer]]:
    server = ScriptedServer(WrongServer(read_model_info(tiny_model)))
    config = RunConfig(
        output_dir=tmp_path / "run",
        model=ModelConfig(path=tiny_model),
        environment=EnvironmentConfig(type="tests.integration.test_malformed:Malformed"),
        images=ImagesConfig(max_pixels=100_000, max_bytes=50_000, max_aspect_ratio=50, max_per_prompt=8),
        inference=InferenceConfig(port=int(server.url.rpartition(":")[2])),
        orchestrator=OrchestratorConfig(prompts_per_step=PROMPTS, group_size=GROUP, max_failed_frac=1.0),
    )
    orchestrator = Orchestrator(config)
    # The order of tasks is drawn from the seed; here every task is to come once, in order, so that it can be counted.
    orchestrator._task_indices = lambda step: list(range(step * PROMPTS, (step + 1) * PROMPTS))
    yield orchestrator, server
    server.close()


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_every_bad_rollout_is_set_aside_and_every_good_one_trained(played: tuple[Orchestrator, ScriptedServer]) -> None:
    orchestrator, server = played
    trained: list[str] = []
    memory: list[int] = []

    async def main() -> None:
        for step in range(NUM_STEPS):
            groups = await orchestrator.play_step(step)
            orchestrator.record(step, groups)
            trained.extend(sample.trace_id for sample in orchestrator.to_samples(groups)[0])
            server.requests.clear()
            memory.append(rss_bytes())
        await orchestrator.client.close()

    asyncio.run(main())
    environment = orchestrator.environment
    assert isinstance(environment, Malformed)
    planned = Counter(environment.kind(index) for index in range(NUM_STEPS * PROMPTS))
    lines = (orchestrator.config.output_dir / "quarantine.jsonl").read_text().splitlines()
    failed = [json.loads(line) for line in lines]
    assert len(failed) == NUM_STEPS * PROMPTS * GROUP // 2 == 1000

    wanted = Counter({reason: 0 for reason in KINDS.values()})
    for kind, reason in KINDS.items():
        wanted[reason] += planned[kind] * GROUP
    assert Counter(trace["failure"]["reason"] for trace in failed) == wanted
    for trace in failed:
        kind = trace["task_id"].rpartition("-")[0]
        if kind in KINDS:
            assert trace["failure"]["reason"] == KINDS[kind], trace["failure"]
        assert "base64," not in trace["failure"]["message"]

    assert len(trained) == len(set(trained)) == planned["good"] * GROUP == 1000
    growth = memory[-1] - memory[NUM_STEPS // 4]
    print(f"RSS {memory[NUM_STEPS // 4]} bytes after {NUM_STEPS // 4} steps, {growth:+d} after {NUM_STEPS}")
    assert growth < 4_000_000
