"""Replay without a server: what is selected, played, said and returned (the rest is in `tests/integration`)."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from latepix.cli import main
from latepix.config.loader import write_config
from latepix.config.schema import EnvironmentConfig, RunConfig
from latepix.environments.base import Environment, Score, Split, Task
from latepix.errors import ConfigError, EnvError, ImageError, InferenceError, RolloutError
from latepix.inference.client import Sampling
from latepix.inference.render import MessageRenderer
from latepix.orchestrator.rollout import RolloutSpec, play
from latepix.replay import (
    Outcome,
    choose_model,
    describe_outcome,
    describe_recorded,
    read_quarantine,
    replay_trace,
    select_traces,
    summary_line,
)
from latepix.trace.graph import RolloutFailure, Trace
from latepix.trace.ingress import ingest_image
from latepix.trace.messages import Message, user_message
from latepix.trace.store import TraceWriter
from tests.tiny.pictures import make_image
from tests.tiny.servers import FakeClient


class Judged(Environment):
    """Fails in whatever way it is told to; task n wants the answer n."""

    name = "judged"

    def __init__(self, how: str) -> None:
        super().__init__(EnvironmentConfig(), ingest_image)
        self._how = how

    def num_tasks(self, split: Split) -> int:
        return 10

    def task(self, split: Split, index: int) -> Task:
        if self._how == "no task":
            ingest_image(b"no picture")
        return Task(id=f"{split}-{index}", messages=(user_message(make_image(seed=index), "?"),), answer=str(index))

    def score(self, task: Task, answer: Message) -> Score:
        if self._how == "bad config":
            raise ConfigError("environment.type: needs a judge")
        if self._how == "raises":
            try:
                raise KeyError(answer.text)
            except KeyError as error:
                raise ValueError(f"cannot judge {task.id}") from error
        return Score(reward=float(answer.text == task.answer))


def make_failed(trace_id: str = "s0-g0-r0", *, reason: str = "environment_raised", **fields: Any) -> Trace:
    fields = {"task_index": 4, "seed": 77, "temperature": 0.5} | fields
    failure = RolloutFailure(
        reason=reason, message="environment judged, task train-4: ValueError: cannot judge train-4"
    )
    return Trace(id=trace_id, environment="judged", task_id="train-4", failure=failure, **fields)


def make_config(model: Path, out: Path) -> RunConfig:
    return RunConfig.model_validate({"output_dir": out, "model": {"path": model}, "sampling": {"max_tokens": 8}})


def replay(trace: Trace, how: str, renderer: MessageRenderer) -> tuple[Outcome, FakeClient]:
    client = FakeClient(info=renderer.info, replies=[renderer.answer_ids("4")])
    config = make_config(renderer.info.path, Path("never-made"))
    return asyncio.run(replay_trace(trace, Judged(how), client, renderer, config)), client


def test_a_rollout_records_what_it_takes_to_replay_it(renderer: MessageRenderer, tmp_path: Path) -> None:
    environment = Judged("raises")
    spec = RolloutSpec(
        trace_id="s0-g0-r0",
        task=environment.task("train", 4),
        split="train",
        step=0,
        group_id=0,
        sampling=Sampling(temperature=0.5, max_tokens=8, seed=77),
        task_index=4,
    )
    client = FakeClient(info=renderer.info, replies=[renderer.answer_ids("4")])
    trace = asyncio.run(play(environment, client, renderer, spec, max_images=4, max_model_len=4096))
    assert (trace.task_index, trace.seed, trace.temperature) == (4, 77, 0.5)
    TraceWriter(tmp_path).append_quarantine([trace])
    (read,) = read_quarantine(tmp_path)
    assert (read.task_index, read.seed, read.temperature) == (4, 77, 0.5)
    assert read.failure == make_failed().failure


def test_a_trace_of_an_older_version_has_no_task(tmp_path: Path) -> None:
    (tmp_path / "quarantine.jsonl").write_text('{"id": "a", "environment": "digits", "task_id": "train-4"}\n')
    (trace,) = read_quarantine(tmp_path)
    assert trace.task_index == -1
    with pytest.raises(
        ConfigError, match="Rollout a cannot be replayed: it was recorded without the index of its task"
    ):
        select_traces([trace], trace_id="a", limit=None)


def test_it_is_played_with_the_same_task_seed_and_temperature(renderer: MessageRenderer) -> None:
    outcome, client = replay(make_failed(), "raises", renderer)
    assert outcome.reason == "environment_raised"
    assert client.samplings == [Sampling(temperature=0.5, max_tokens=8, seed=77)]
    assert [image.sha256 for image in client.prompts[0].images] == [make_image(seed=4).sha256]


def test_the_whole_error_is_shown_with_its_causes(renderer: MessageRenderer) -> None:
    outcome, _ = replay(make_failed(), "raises", renderer)
    shown = describe_outcome(make_failed(), outcome)
    assert shown.startswith("now: environment_raised (the same reason)\nTraceback (most recent call last):")
    assert "KeyError: '4'" in shown
    assert "The above exception was the direct cause of the following exception:" in shown
    assert "in score" in shown
    assert shown.endswith("ValueError: cannot judge train-4")


def test_a_task_that_cannot_be_made_fails_with_its_own_reason(renderer: MessageRenderer) -> None:
    outcome, client = replay(make_failed(), "no task", renderer)
    assert outcome.reason == "not_an_image"
    assert client.prompts == []
    assert "now: not_an_image (another reason)" in describe_outcome(make_failed(), outcome)


def test_a_success_says_its_reward(renderer: MessageRenderer) -> None:
    outcome, _ = replay(make_failed(), "", renderer)
    assert outcome == Outcome(reason=None, text="reward 1")
    assert describe_outcome(make_failed(), outcome) == "now: succeeded this time, reward 1"


def test_a_setting_that_is_wrong_ends_the_replay(renderer: MessageRenderer) -> None:
    with pytest.raises(ConfigError, match="needs a judge"):
        replay(make_failed(), "bad config", renderer)


def test_what_was_recorded_is_named() -> None:
    assert describe_recorded(make_failed()) == (
        "rollout s0-g0-r0: task 4 of split train (train-4), seed 77, temperature 0.5\n"
        "recorded: environment_raised: environment judged, task train-4: ValueError: cannot judge train-4"
    )


def test_rollouts_are_selected_by_id_and_number() -> None:
    traces = [make_failed(f"s0-g0-r{number}") for number in range(12)]
    assert select_traces(traces, trace_id=None, limit=None) == traces
    assert select_traces(traces, trace_id=None, limit=2) == traces[:2]
    assert select_traces(traces, trace_id="s0-g0-r3", limit=None) == [traces[3]]


def test_an_unknown_id_lists_ten_that_there_are() -> None:
    traces = [make_failed(f"s0-g0-r{number}") for number in range(12)]
    with pytest.raises(ConfigError) as caught:
        select_traces(traces, trace_id="s9-g9-r9", limit=None)
    listed = ", ".join(f"s0-g0-r{number}" for number in range(10))
    assert str(caught.value) == f"No quarantined rollout has the id 's9-g9-r9'. There are {listed} and 2 more."


def test_the_model_is_the_one_given_or_the_runs_last_or_its_first(tmp_path: Path) -> None:
    config = make_config(Path("first"), tmp_path)
    assert choose_model(tmp_path, config, None) == (Path("first"), "model.path of the run's config")
    (tmp_path / "model").mkdir()
    assert choose_model(tmp_path, config, None) == (tmp_path / "model", "the run's final weights")
    assert choose_model(tmp_path, config, Path("given")) == (Path("given"), "--model")


def test_the_summary_counts_outcomes() -> None:
    traces = [make_failed(reason=reason) for reason in ("a", "a", "b", "b")]
    outcomes = [Outcome(reason=reason, text="") for reason in ("a", "b", None, "b")]
    assert (
        summary_line(traces, outcomes)
        == "replayed 4: 2 failed again for the same reason, 1 for another one, 1 succeeded"
    )


def test_a_run_without_failures_has_nothing_to_replay(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(make_config(tiny_model, tmp_path), tmp_path)
    assert main(["replay", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"nothing was quarantined in {tmp_path}\n"


def test_a_users_mistake_has_exit_status_2(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    assert f"{tmp_path} is not a run folder" in capsys.readouterr().err
    write_config(make_config(tiny_model, tmp_path), tmp_path)
    TraceWriter(tmp_path).append_quarantine([make_failed()])
    assert main(["replay", str(tmp_path), "--id", "s1-g1-r1"]) == 2
    assert "There are s0-g0-r0." in capsys.readouterr().err
    assert main(["replay", str(tmp_path), "--model", str(tmp_path / "nowhere")]) == 2
    assert "does not exist (model.path)" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["replay", str(tmp_path), "--limit", "0"])
    assert caught.value.code == 2
    assert "--limit: got '0', wanted a whole number above 0" in capsys.readouterr().err


def test_the_documentation_names_every_reason() -> None:
    text = (Path(__file__).parents[2] / "docs" / "quarantine.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([a-z_0-9]+)`", text[text.index("| code |") : text.index("An answer that was cut")]))
    of_pictures = set(re.findall(r"`([a-z_0-9]+)`", str(ingest_image.__doc__).partition("`reason` one of")[2]))
    of_errors = {RolloutError.reason, EnvError.reason, InferenceError.reason, ImageError("").reason}
    assert len(of_pictures) > 10
    assert of_pictures | of_errors | {"placeholder_mismatch", "too_many_images"} <= documented
