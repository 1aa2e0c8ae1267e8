"""What pictures and turns cost, against numbers counted by hand on the tiny model.

A square of 32 x 32 pixels is one token. A prompt that asks `which digit?` has 14 tokens of text, and each picture two
more around its own; a later turn that asks `next?` adds 13 after the answer's stop token, its line break included.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from latepix.budget import Budget, Spread, brief_lines, measure_budget, print_budget, sum_up, turns_that_fit
from latepix.cli import main
from latepix.config.schema import RunConfig
from latepix.environments.base import Environment, Policy, Score, Split, Task, exact_match
from latepix.errors import ConfigError, RolloutError
from latepix.families.model_info import ModelInfo, read_model_info
from latepix.inference.client import InferenceClient, Prompt, Sampling
from latepix.inference.contract import MAX_BODY_BYTES
from latepix.inference.render import MessageRenderer
from latepix.orchestrator.dry import DryPolicy, DryRollout, DryTurn, request_bytes
from latepix.trace.ingress import ingest_image
from latepix.trace.messages import Message, user_message
from tests.tiny.pictures import draw_picture
from tests.tiny.servers import scripted_server

MAX_TOKENS = 8


class OnePicture(Environment):
    """Task n shows a picture of 32 x (n + 1) by 64 pixels, 2 * (n + 1) tokens."""

    name = "one-picture"

    def num_tasks(self, split: Split) -> int:
        return 3

    def task(self, split: Split, index: int) -> Task:
        picture = self.ingest(draw_picture(width=32 * (index + 1), height=64, seed=index))
        return Task(id=f"{split}-{index}", messages=(user_message(picture, "which digit?"),), answer="7")

    def score(self, task: Task, answer: Message) -> Score:
        return exact_match(task, answer)


class ThreeTurns(OnePicture):
    """Shows one more picture of 32 x 32 pixels in each of two later turns."""

    name = "three-turns"

    def num_tasks(self, split: Split) -> int:
        return 1

    async def rollout(self, task: Task, policy: Policy) -> Score:
        first = await policy.respond(task.messages)
        assert first.text == task.answer, "filler must not be seen"
        for seed in (1, 2):
            answer = await policy.respond([user_message(self.ingest(draw_picture(seed=seed)), "next?")])
        return self.score(task, answer)


class Endless(OnePicture):
    """Never stops asking, whatever goes wrong."""

    name = "endless"

    async def rollout(self, task: Task, policy: Policy) -> Score:
        await policy.respond(task.messages)
        while True:
            try:
                await policy.respond([user_message("next?")])
            except RolloutError as error:
                if "the limit is" in str(error):
                    raise ValueError("the conversation is full") from error


class Deaf(OnePicture):
    """Never stops asking, not even when told that the conversation is full."""

    name = "deaf"

    async def rollout(self, task: Task, policy: Policy) -> Score:
        while True:
            with contextlib.suppress(RolloutError):
                await policy.respond([user_message("next?")])


class SomeFail(OnePicture):
    """Task 0 cannot be made, task 1 raises after the first answer."""

    name = "some-fail"

    def task(self, split: Split, index: int) -> Task:
        if index == 0:
            self.ingest(b"no picture")
        return super().task(split, index)

    async def rollout(self, task: Task, policy: Policy) -> Score:
        await policy.respond(task.messages)
        if task.id == "train-1":
            raise KeyError(task.id)
        return Score(reward=0.0)


class Large(OnePicture):
    """Shows a picture of 2560 x 2560 pixels, which the tiny model takes as 1024 x 1024."""

    name = "large"

    def task(self, split: Split, index: int) -> Task:
        picture = self.ingest(draw_picture(width=2560, height=2560, seed=index))
        return Task(id=f"{split}-{index}", messages=(user_message(picture, "which digit?"),), answer="7")


class NoTasks(OnePicture):
    def num_tasks(self, split: Split) -> int:
        return 0


class BadCount(OnePicture):
    def num_tasks(self, split: Split) -> int:
        raise OSError("no such data set")


class Misconfigured(OnePicture):
    def score(self, task: Task, answer: Message) -> Score:
        raise ConfigError("environment.type: needs a judge")


def make_config(model: Path, cls: type[Environment], **sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "output_dir": "never-made",
            "model": {"path": model},
            "environment": {"type": f"tests.unit.test_budget:{cls.__name__}"},
            "sampling": {"max_tokens": MAX_TOKENS},
        }
        | sections
    )


def measure(model: Path, cls: type[Environment], **sections: dict[str, Any]) -> Budget:
    return measure_budget(make_config(model, cls, **sections), num_tasks=64)


def test_a_single_turn_by_hand(tiny_model: Path) -> None:
    budget = measure(tiny_model, OnePicture)
    assert (budget.environment, budget.num_tasks, budget.failed) == ("one-picture", 3, {})
    assert budget.turns == Spread(1, 1, 1)
    assert budget.images == Spread(1, 1, 1)
    assert budget.image_tokens == Spread(2, 4, 6)
    assert budget.first_prompt_tokens == budget.last_prompt_tokens == Spread(14 + 4, 14 + 6, 14 + 8)
    assert budget.rollout_tokens == Spread(26, 28, 30)
    assert budget.image_frac == Spread(2 / 26, 4 / 28, 6 / 30)
    assert budget.seq_len_frac == Spread(26 / 4096, 28 / 4096, 30 / 4096)
    assert budget.turns_that_fit is None
    assert budget.warnings == ()


def test_several_turns_by_hand(tiny_model: Path) -> None:
    budget = measure(tiny_model, ThreeTurns, orchestrator={"seq_len": 100})
    assert budget.turns == Spread(3, 3, 3)
    assert budget.images == Spread(3, 3, 3)
    assert budget.image_tokens == Spread(1, 1, 2)
    growth = MAX_TOKENS + 13 + 3
    assert budget.first_prompt_tokens == Spread(18, 18, 18)
    assert budget.last_prompt_tokens == Spread(18 + 2 * growth, 18 + 2 * growth, 18 + 2 * growth)
    # 18 + 3 * 24 + 8 = 98 is the fourth turn; a fifth would need 122.
    assert budget.turns_that_fit == Spread(4, 4, 4)
    assert budget.warnings == ()


def test_a_sample_on_the_wire_has_its_share_of_the_groups_pictures(tiny_model: Path) -> None:
    few = measure(tiny_model, OnePicture, orchestrator={"group_size": 2}).wire_bytes_per_sample
    many = measure(tiny_model, OnePicture, orchestrator={"group_size": 32}).wire_bytes_per_sample
    assert few is not None
    assert many is not None
    # Random pixels do not compress: 3 bytes each for the pictures of 2, 4 and 6 squares, divided among the siblings.
    mean_picture = 3 * 32 * 32 * 4
    assert few - many == pytest.approx(mean_picture * (1 / 2 - 1 / 32), rel=0.1)
    # 13 bytes a token: id, mask, logprob, advantage.
    assert many > 13 * 28


def test_a_conversation_that_fills_the_models_length_ends_there(tiny_model: Path) -> None:
    budget = measure(tiny_model, Endless, inference={"max_model_len": 100})
    assert budget.failed == {}
    assert budget.last_prompt_tokens is not None
    assert 100 <= budget.last_prompt_tokens.min <= budget.last_prompt_tokens.max < 100 + 21
    assert ["inference.max_model_len (100," in warning for warning in budget.warnings] == [True]
    assert "3 of 3 rollouts" in budget.warnings[0]


def test_a_rollout_that_never_ends_is_given_up_in_time(tiny_model: Path) -> None:
    budget = measure_budget(make_config(tiny_model, Deaf), num_tasks=64, time_limit_s=0.2)
    assert (budget.num_tasks, budget.turns) == (0, None)
    assert brief_lines(budget) == ["nothing could be measured: 0 tasks were played, 0 of them failed"]


def test_tasks_that_fail_are_reported_with_their_reason(tiny_model: Path) -> None:
    budget = measure(tiny_model, SomeFail)
    assert budget.num_tasks == 3
    assert budget.failed == {"not_an_image": 1, "environment_raised": 1}
    # What task 1 asked before it failed counts.
    assert budget.image_tokens == Spread(4, 5, 6)
    (warning,) = budget.warnings
    assert warning.startswith("2 of 3 rollouts failed (")
    assert "not_an_image 1" in warning
    assert "environment some-fail, task " in warning


def test_a_rollout_longer_than_a_sample_is_warned_of(tiny_model: Path) -> None:
    (warning,) = measure(tiny_model, OnePicture, orchestrator={"seq_len": 29}).warnings
    assert warning.startswith("1 of 3 rollouts may exceed orchestrator.seq_len (29); the longest needs 30 tokens")


def test_pictures_that_fill_a_sample_are_warned_of(tiny_model: Path) -> None:
    budget = measure(tiny_model, Large, orchestrator={"seq_len": 1100})
    assert budget.image_tokens == Spread(1024, 1024, 1024)
    (warning,) = [one for one in budget.warnings if "the pictures take more than 90%" in one]
    assert "In 3 of 3 rollouts" in warning
    assert "up to 1,024 of 1,100 tokens" in warning


def test_a_strong_resize_is_warned_of(tiny_model: Path) -> None:
    (warning,) = measure(tiny_model, Large).warnings
    assert warning.startswith("images.fit resizes 3 of 3 pictures looked at by more than a factor of 2, 2560 x 2560 to")
    assert measure(tiny_model, OnePicture).warnings == ()


def test_a_request_that_the_server_refuses_is_warned_of(info: ModelInfo) -> None:
    turn = DryTurn(prompt_tokens=20, image_tokens=(1,), request_bytes=MAX_BODY_BYTES + 1_000_000)
    config = make_config(info.path, OnePicture)
    budget = sum_up([DryRollout(task_id="t", turns=(turn,))], [], config, info, environment="one-picture")
    (warning,) = budget.warnings
    assert warning.startswith("The largest request has 513 MB, the server takes 512 MB")


def test_requests_are_counted_as_the_client_sends_them(info: ModelInfo) -> None:
    images = tuple(ingest_image(draw_picture(width=width)) for width in (32, 70, 71))
    prompt, sampling = Prompt(token_ids=(5, info.image_placeholder_id, 7), images=images), Sampling(1.0, 16, seed=5)

    async def send(url: str) -> None:
        client = InferenceClient(url, stop_ids=info.stop_ids, banned_ids=info.banned_ids)
        client.policy_version = 0
        with contextlib.suppress(RolloutError):
            await client.generate(prompt, sampling)
        await client.close()

    with scripted_server(lambda method, path, body: (200, {"weight_version": "step-0"})) as server:
        asyncio.run(send(server.url))
        (body,) = [body for _, path, body in server.requests if path == "/inference/v1/generate"]
    assert request_bytes(prompt, sampling, info) == len(msgspec.json.encode(body))


@pytest.mark.parametrize(
    ("prompts", "limit", "wanted"),
    [
        ([30, 50, 70], 100, 4),
        ([30, 50, 70], 94, 4),
        ([30, 50, 70], 93, 3),
        ([30, 50, 70], 34, 1),
        ([30, 50, 70], 33, 0),
        ([30], 100, None),
        ([30, 30], 100, None),
        ([50, 30], 100, None),
    ],
)
def test_turns_that_fit_are_extrapolated(prompts: Sequence[int], limit: int, wanted: int | None) -> None:
    turns = [DryTurn(prompt_tokens=tokens, image_tokens=(), request_bytes=0) for tokens in prompts]
    assert turns_that_fit(turns, answer_tokens=4, limit=limit) == wanted


@pytest.mark.parametrize("max_tokens", [1, 2, 8])
def test_the_dry_policy_says_the_tasks_answer_at_full_length(tiny_model: Path, max_tokens: int) -> None:
    renderer = MessageRenderer(read_model_info(tiny_model))
    config = make_config(tiny_model, OnePicture, sampling={"max_tokens": max_tokens})
    policy = DryPolicy(renderer, Task(id="t", messages=(), answer="7"), config)
    answer = asyncio.run(policy.respond([user_message("which digit?")]))
    assert answer.text == "7"
    assert [sum(node.mask) for node in policy.nodes] == [0, max_tokens]


@pytest.mark.parametrize(
    ("cls", "said"),
    [(NoTasks, "has 0 tasks in split train"), (BadCount, "no such data set"), (Misconfigured, "needs a judge")],
)
def test_an_environment_that_cannot_be_played_is_a_config_error(
    tiny_model: Path, cls: type[Environment], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        measure(tiny_model, cls)


def test_tasks_are_drawn_with_the_runs_seed(tiny_model: Path) -> None:
    config = make_config(tiny_model, OnePicture)
    seen = {
        seed: measure_budget(config.model_copy(update={"seed": seed}), num_tasks=1).image_tokens for seed in range(8)
    }
    assert len({str(tokens) for tokens in seen.values()}) == 3
    assert measure_budget(config, num_tasks=1).image_tokens == seen[0]


def test_the_command_ends_with_one_json_object(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--model.path", str(tiny_model), "--output_dir", "never-made", "--num-tasks", "2"]
    code = main(["budget", *settings, "--environment.type", "tests.unit.test_budget:ThreeTurns"])
    out = capsys.readouterr().out
    *table, last = out.splitlines()
    assert code == 0
    assert not Path("never-made").exists()
    values = json.loads(last)
    assert values.keys() == set(Budget.__struct_fields__)
    assert values["turns"] == {"min": 3, "median": 3, "max": 3}
    assert values["max_body_bytes"] == 512_000_000
    assert [line.split() for line in table if line.startswith("pictures per rollout")] == [
        ["pictures", "per", "rollout", "3", "3", "3"]
    ]
    assert "\x1b" not in out


def test_the_number_of_tasks_is_no_setting_of_a_run(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["rl", "--model.path", str(tiny_model), "--output_dir", "never-made", "--num-tasks", "2"])
    assert code == 1
    assert "num_tasks: unknown key" in capsys.readouterr().err


def test_a_run_begins_with_three_lines(tiny_model: Path) -> None:
    pictures, tokens, request = brief_lines(measure(tiny_model, OnePicture))
    assert pictures == "pictures: 1 a rollout, tokens each: 2-6, 7.69-20 % of a rollout's tokens (3 tasks looked at)"
    assert tokens == (
        "tokens: first prompt 18-22, last 18-22; a rollout takes 0.635-0.732 % of seq_len 4,096 (median 0.684 %); "
        "single turn"
    )
    assert request.startswith("bytes: largest request ")
    assert brief_lines(measure(tiny_model, ThreeTurns))[1].endswith("170 turns fit")


def test_a_budget_without_numbers_is_still_printed(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budget = measure(tiny_model, OnePicture)
    empty = {name: None for name, value in msgspec.structs.asdict(budget).items() if isinstance(value, Spread)}
    print_budget(msgspec.structs.replace(budget, **empty, wire_bytes_per_sample=None, warnings=("[x] is odd",)))
    out = capsys.readouterr().out
    assert "per sample to the trainer, about \N{EN DASH}" in out
    assert "warning: [x] is odd" in out
