from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from latepix.config.schema import EnvironmentConfig
from latepix.environments.base import Environment, Policy, Score, Split, Task
from latepix.errors import ConfigError, InferenceError
from latepix.families.model_info import ModelInfo
from latepix.inference.client import ANYWHERE, Generation, Prompt, Routing, Sampling
from latepix.inference.render import MessageRenderer
from latepix.orchestrator.batch import validate_sample
from latepix.orchestrator.rollout import RolloutSpec, make_task, play
from latepix.orchestrator.samples import trace_to_samples
from latepix.trace.graph import Trace
from latepix.trace.ingress import ingest_image
from latepix.trace.messages import Message, TextPart, assistant_message, user_message
from latepix.trace.store import TraceWriter, read_traces
from tests.tiny.pictures import make_image
from tests.tiny.servers import FakeClient, lengthen_last_picture

A, B = make_image(seed=1), make_image(width=64, height=96, seed=2)


class OneTurn(Environment):
    """Shows one picture; the score is whatever the test wants."""

    name = "one-turn"

    def __init__(self, judge: Callable[[Message], Score]) -> None:
        super().__init__(EnvironmentConfig(), ingest_image)
        self._judge = judge

    def num_tasks(self, split: Split) -> int:
        return 1

    def task(self, split: Split, index: int) -> Task:
        return Task(id="task-0", messages=(user_message(A, "which digit?"),), answer="7")

    def score(self, task: Task, answer: Message) -> Score:
        return self._judge(answer)


class Conversation(OneTurn):
    """Shows further pictures after the first answer, and asks a tool in between."""

    name = "conversation"

    async def rollout(self, task: Task, policy: Policy) -> Score:
        await policy.respond(task.messages)
        await policy.respond([user_message("and", B, "?")])
        answer = await policy.respond(
            [Message(role="tool", content=(TextPart(text="<|image_pad|>"),), tool_call_id="c"), user_message(A, A)]
        )
        return self._judge(answer)


def exact(answer: Message) -> Score:
    return Score(reward=float(answer.text == "7"), parts={"exact": float(answer.text == "7")})


def make_spec(environment: Environment, *, seed: int = 5) -> RolloutSpec:
    return RolloutSpec(
        trace_id="s1-g2-r3",
        task=environment.task("train", 0),
        split="train",
        step=1,
        group_id=2,
        sampling=Sampling(temperature=1.0, max_tokens=8, seed=seed),
    )


def run(
    environment: Environment,
    client: FakeClient,
    renderer: MessageRenderer,
    *,
    max_images: int = 64,
    max_model_len: int = 4096,
) -> Trace:
    async def main() -> Trace:
        spec = make_spec(environment)
        try:
            return await play(environment, client, renderer, spec, max_images=max_images, max_model_len=max_model_len)
        finally:
            await client.close()

    return asyncio.run(main())


def test_one_turn_is_recorded_with_its_reward(info: ModelInfo, renderer: MessageRenderer) -> None:
    client = FakeClient(info=info, replies=[renderer.answer_ids("7")])
    trace = run(OneTurn(exact), client, renderer)
    assert (trace.reward, trace.reward_parts, trace.failure) == (1.0, {"exact": 1.0}, None)
    assert (trace.id, trace.environment, trace.task_id) == ("s1-g2-r3", "one-turn", "task-0")
    assert (trace.step, trace.group_id, trace.split, trace.answer) == (1, 2, "train", "7")
    assert [node.message.role for node in trace.nodes] == ["user", "assistant"]
    assert trace.nodes[-1].policy_version == 3


def test_an_answer_that_hit_the_token_limit_is_marked(info: ModelInfo, renderer: MessageRenderer) -> None:
    client = FakeClient(info=info, replies=[renderer.answer_ids("7 7 7")[:-1]])
    assert run(OneTurn(exact), client, renderer).is_truncated


def test_a_conversation_extends_its_history_and_never_tokenizes_it_again(
    info: ModelInfo, renderer: MessageRenderer
) -> None:
    # Ids that no tokenizer makes of their text ("7" split into no merge, twice), and an answer that was cut off.
    seven = renderer.tokenizer.encode("which")
    letters = [renderer.tokenizer.encode(letter)[0] for letter in "which"]
    assert letters != seven
    replies = [[*letters, info.stop_ids[0]], letters, renderer.answer_ids("7")]
    client = FakeClient(info=info, replies=replies)
    trace = run(Conversation(exact), client, renderer)
    assert trace.failure is None
    assert trace.reward == 1.0

    (branch,) = trace.branches
    last = client.prompts[-1]
    lengths = [info.num_image_tokens(image) for image in last.images]
    assert list(last.images) == [A, B, A, A]
    assert lengths == [1, 6, 1, 1]
    # The branch is the last prompt, expanded, and the last answer.
    expanded = [
        t
        for token in last.token_ids
        for t in ([token] * lengths.pop(0) if token == info.image_placeholder_id else [token])
    ]
    assert branch.token_ids.tolist() == expanded + replies[-1]
    # Each prompt starts with the one before and what was sampled then.
    for before, reply, after in zip(client.prompts, replies, client.prompts[1:], strict=False):
        assert list(after.token_ids[: len(before.token_ids) + len(reply)]) == [*before.token_ids, *reply]
    sampled = [branch.token_ids[branch.sampled_mask].tolist()]
    assert sampled == [[token for reply in replies for token in reply]]

    (sample,) = trace_to_samples(trace)
    validate_sample(sample, info)
    assert [image for image, _, _ in sample.mm_refs.slots()] == [A, B, A, A]


def test_a_conversations_messages_are_recorded_in_order(info: ModelInfo, renderer: MessageRenderer) -> None:
    client = FakeClient(info=info, replies=[renderer.answer_ids("7")] * 3)
    trace = run(Conversation(exact), client, renderer)
    assert [node.message.role for node in trace.nodes] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "user",
        "assistant",
    ]
    assert [len(node.ranges) for node in trace.nodes] == [1, 0, 1, 0, 0, 2, 0]


def test_turns_are_sampled_with_seeds_far_apart(info: ModelInfo, renderer: MessageRenderer) -> None:
    client = FakeClient(info=info, replies=[renderer.answer_ids("7")] * 3)
    run(Conversation(exact), client, renderer)
    assert [sampling.seed for sampling in client.samplings] == [5, 1_000_008, 2_000_011]


def raise_value_error(answer: Message) -> Score:
    raise ValueError("no such digit")


def test_an_environment_that_raises_fails_its_rollout_alone(info: ModelInfo, renderer: MessageRenderer) -> None:
    trace = run(OneTurn(raise_value_error), FakeClient(info=info, replies=[renderer.answer_ids("7")]), renderer)
    assert trace.failure is not None
    assert trace.failure.reason == "environment_raised"
    assert trace.failure.message == "environment one-turn, task task-0: ValueError: no such digit"
    assert (trace.reward, trace.reward_parts) == (None, {})
    # What was played before the failure is kept.
    assert len(trace.nodes) == 2


@pytest.mark.parametrize(
    ("score", "problem"),
    [
        (Score(reward=math.nan), "the reward is nan"),
        (Score(reward=math.inf), "the reward is inf"),
        (Score(reward="1"), "the reward is '1'"),  # ty: ignore[invalid-argument-type]
        (Score(reward=None), "the reward is None"),  # ty: ignore[invalid-argument-type]
        (Score(reward=1.0, parts={"style": math.nan}), "the style is nan"),
        (None, "the rollout gave None, wanted a Score"),
    ],
)
def test_a_reward_that_is_no_finite_number_fails_the_rollout(
    info: ModelInfo, renderer: MessageRenderer, score: Any, problem: str
) -> None:
    trace = run(OneTurn(lambda answer: score), FakeClient(info=info, replies=[renderer.answer_ids("7")]), renderer)
    assert trace.failure is not None
    assert trace.failure.reason == "environment_raised"
    assert problem in trace.failure.message


@pytest.mark.parametrize("reward", [1, True, np.float32(1.0), np.int64(1)])
def test_any_real_number_is_a_reward(info: ModelInfo, renderer: MessageRenderer, reward: Any, tmp_path: Path) -> None:
    client = FakeClient(info=info, replies=[renderer.answer_ids("7")])
    trace = run(OneTurn(lambda answer: Score(reward=reward, parts={"exact": reward})), client, renderer)
    assert trace.reward == 1.0
    assert list(read_traces(TraceWriter(tmp_path).write("step_000001", [trace]))) == [trace]


def test_a_picture_of_another_length_is_a_placeholder_mismatch(info: ModelInfo, renderer: MessageRenderer) -> None:
    client = FakeClient(info=info, replies=[renderer.answer_ids("7")], change=lengthen_last_picture)
    trace = run(OneTurn(exact), client, renderer)
    assert trace.failure is not None
    assert trace.failure.reason == "placeholder_mismatch"
    assert "picture 0: 32 x 32 pixels need 1 tokens, the server placed 2" in trace.failure.message
    assert trace.reward is None


def test_an_answer_for_another_prompt_is_a_placeholder_mismatch(info: ModelInfo, renderer: MessageRenderer) -> None:
    def shift(generation: Generation) -> Generation:
        return msgspec.structs.replace(generation, prompt_token_ids=[0, *generation.prompt_token_ids])

    client = FakeClient(info=info, replies=[renderer.answer_ids("7")], change=shift)
    trace = run(OneTurn(exact), client, renderer)
    assert trace.failure is not None
    assert trace.failure.reason == "placeholder_mismatch"
    assert trace.nodes == ()


def test_a_sampled_placeholder_fails_the_rollout(info: ModelInfo, renderer: MessageRenderer) -> None:
    client = FakeClient(info=info, replies=[[info.image_placeholder_id, info.stop_ids[0]]])
    trace = run(OneTurn(exact), client, renderer)
    assert trace.failure is not None
    assert trace.failure.reason == "placeholder_mismatch"


def test_a_server_that_fails_is_recorded(info: ModelInfo, renderer: MessageRenderer) -> None:
    def refuse(generation: Generation) -> Generation:
        raise InferenceError("HTTP 500: out of memory")

    trace = run(OneTurn(exact), FakeClient(info=info, replies=[[0]], change=refuse), renderer)
    assert trace.failure is not None
    assert (trace.failure.reason, trace.failure.message) == (
        "inference_failed",
        "environment one-turn, task task-0: HTTP 500: out of memory",
    )


def test_too_many_pictures_fail_the_rollout(info: ModelInfo, renderer: MessageRenderer) -> None:
    client = FakeClient(info=info, replies=[renderer.answer_ids("7")] * 3)
    trace = run(Conversation(exact), client, renderer, max_images=3)
    assert trace.failure is not None
    assert trace.failure.reason == "too_many_images"
    assert "turn 2: 4 pictures in the conversation, the limit is 3 (images.max_per_prompt)" in trace.failure.message
    assert len(client.prompts) == 2


def test_a_bad_picture_of_an_environment_is_named(info: ModelInfo, renderer: MessageRenderer) -> None:
    def judge(answer: Message) -> Score:
        ingest_image(b"no picture")
        return Score(reward=1.0)

    trace = run(OneTurn(judge), FakeClient(info=info, replies=[renderer.answer_ids("7")]), renderer)
    assert trace.failure is not None
    assert trace.failure.reason == "not_an_image"


def test_a_users_mistake_ends_the_run(info: ModelInfo, renderer: MessageRenderer) -> None:
    def judge(answer: Message) -> Score:
        raise ConfigError("environment.type: needs a file")

    with pytest.raises(ConfigError, match="needs a file"):
        run(OneTurn(judge), FakeClient(info=info, replies=[renderer.answer_ids("7")]), renderer)


def test_the_prompt_that_is_sent_holds_one_placeholder_per_picture(info: ModelInfo, renderer: MessageRenderer) -> None:
    client = FakeClient(info=info, replies=[renderer.answer_ids("7")] * 3)
    run(Conversation(exact), client, renderer)
    counts = [sum(token in info.placeholder_ids for token in prompt.token_ids) for prompt in client.prompts]
    assert counts == [len(prompt.images) for prompt in client.prompts] == [1, 2, 4]


def test_prompts_are_plain(info: ModelInfo, renderer: MessageRenderer) -> None:
    client = FakeClient(info=info, replies=[renderer.answer_ids("7")])
    run(OneTurn(exact), client, renderer)
    assert client.prompts == [
        Prompt(token_ids=tuple(renderer.render([user_message(A, "which digit?")]).token_ids), images=(A,))
    ]


def test_a_conversation_that_fills_the_models_length_ends_with_empty_answers(
    info: ModelInfo, renderer: MessageRenderer
) -> None:
    seven = renderer.answer_ids("7")
    first_prompt = run(OneTurn(exact), FakeClient(info=info, replies=[seven]), renderer).num_tokens - len(seven)
    client = FakeClient(info=info, replies=[seven, seven, seven])
    trace = run(Conversation(exact), client, renderer, max_model_len=first_prompt + 3)
    assert client.samplings[0].max_tokens == 3
    assert len(client.prompts) == 1
    assert trace.is_out_of_room
    assert trace.is_truncated
    assert (trace.failure, trace.reward) == (None, 0.0)


def test_two_answers_of_one_conversation_cannot_be_awaited_at_once(info: ModelInfo, renderer: MessageRenderer) -> None:
    class Impatient(OneTurn):
        async def rollout(self, task: Task, policy: Policy) -> Score:
            await asyncio.gather(policy.respond(task.messages), policy.respond(task.messages))
            return Score(reward=1.0)

    class SlowClient(FakeClient):
        async def generate(self, prompt: Prompt, sampling: Sampling, routing: Routing = ANYWHERE) -> Generation:
            await asyncio.sleep(0)
            return await super().generate(prompt, sampling, routing)

    client = SlowClient(info=info, replies=[renderer.answer_ids("7")] * 2)
    trace = run(Impatient(exact), client, renderer)
    assert trace.failure is not None
    assert "while another answer" in trace.failure.message


def test_a_second_attempt_goes_on_from_the_tokens_of_the_turn_it_repeats(
    info: ModelInfo, renderer: MessageRenderer
) -> None:
    """Two attempts at the second turn: the first turn is stored and trained once, its tokens never made again."""

    class TwoAttempts(OneTurn):
        async def rollout(self, task: Task, policy: Policy) -> Score:
            first = await policy.respond(task.messages)
            await policy.respond([user_message("and", B, "?")])
            await policy.respond([user_message("and", B, "?")], history=[*task.messages, first])
            return Score(reward=1.0)

    replies = [renderer.answer_ids("7"), renderer.answer_ids("8"), renderer.answer_ids("9")]
    client = FakeClient(info=info, replies=replies)
    trace = run(TwoAttempts(exact), client, renderer)
    assert trace.failure is None
    first, second = trace.branches
    assert first.node_indices[:-1] == second.node_indices[:-1]
    assert client.prompts[1] == client.prompts[2]
    samples = trace_to_samples(msgspec.structs.replace(trace, advantage=1.0))
    trained = [sample.token_ids[sample.loss_mask].tolist() for sample in samples]
    assert trained == [[*replies[0], *replies[1]], replies[2]]


def test_edited_history_is_a_branch_that_shares_what_was_not_edited(info: ModelInfo, renderer: MessageRenderer) -> None:
    class Edits(OneTurn):
        async def rollout(self, task: Task, policy: Policy) -> Score:
            await policy.respond(task.messages)
            await policy.respond([user_message("and?")], history=[*task.messages, assistant_message("edited")])
            return Score(reward=1.0)

    client = FakeClient(info=info, replies=[renderer.answer_ids("7"), renderer.answer_ids("8")])
    trace = run(Edits(exact), client, renderer)
    assert trace.failure is None
    first, second = trace.branches
    assert first.node_indices[0] == second.node_indices[0]
    assert "edited" in renderer.tokenizer.decode(second.token_ids.tolist())
    samples = trace_to_samples(msgspec.structs.replace(trace, advantage=1.0))
    assert [sample.token_ids[sample.loss_mask].tolist() for sample in samples] == [
        renderer.answer_ids("7"),
        renderer.answer_ids("8"),
    ]


def test_a_sub_agent_with_a_context_of_its_own_is_a_branch_of_its_own(
    info: ModelInfo, renderer: MessageRenderer
) -> None:
    class Delegates(OneTurn):
        async def rollout(self, task: Task, policy: Policy) -> Score:
            await policy.respond(task.messages)
            helped = await policy.respond([user_message("look", B)], history=[])
            answer = await policy.respond([user_message(helped.text)], history=[*task.messages, assistant_message("7")])
            return self._judge(answer)

    client = FakeClient(info=info, replies=[renderer.answer_ids(text) for text in "787"])
    trace = run(Delegates(exact), client, renderer)
    assert (trace.failure, trace.reward) == (None, 1.0)
    assert [branch.node_indices for branch in trace.branches] == [(2, 3), (0, 1, 4, 5)]
    assert len(client.prompts[1].images) == 1


class Raises(OneTurn):
    """Its rollouts do what the test wants."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__(exact)
        self._act = act

    async def rollout(self, task: Task, policy: Policy) -> Score:
        result = self._act()
        if isinstance(result, Awaitable):
            await result
        return Score(reward=1.0)


def leave() -> None:
    raise SystemExit(0)


def cancel() -> None:
    raise asyncio.CancelledError


def speak_in_surrogates() -> None:
    raise ValueError("\ud800")


@pytest.mark.parametrize(
    ("act", "problem"),
    [(leave, "SystemExit: 0"), (cancel, "CancelledError"), (speak_in_surrogates, "ValueError: ?")],
    ids=["exits", "cancels", "says what cannot be written"],
)
def test_whatever_a_rollout_does_belongs_to_it_alone(
    info: ModelInfo, renderer: MessageRenderer, act: Callable[[], object], problem: str, tmp_path: Path
) -> None:
    trace = run(Raises(act), FakeClient(info=info, replies=[]), renderer)
    assert trace.failure is not None
    assert trace.failure.reason == "environment_raised"
    assert problem in trace.failure.message
    assert list(read_traces(TraceWriter(tmp_path).write("step_000000", [trace]))) == [trace]


def test_a_rollout_that_takes_too_long_fails(info: ModelInfo, renderer: MessageRenderer) -> None:
    async def main() -> Trace:
        environment = Raises(lambda: asyncio.sleep(60))
        client = FakeClient(info=info, replies=[])
        return await play(
            environment, client, renderer, make_spec(environment), max_images=4, max_model_len=99, timeout_s=0.05
        )

    trace = asyncio.run(main())
    assert trace.failure is not None
    assert trace.failure.reason == "timeout"
    assert "no end after 0.05 s (orchestrator.rollout_timeout_s)" in trace.failure.message


def test_our_own_cancellation_is_not_swallowed(info: ModelInfo, renderer: MessageRenderer) -> None:
    async def main() -> None:
        environment = Raises(lambda: asyncio.sleep(60))
        client = FakeClient(info=info, replies=[])
        task = asyncio.create_task(
            play(environment, client, renderer, make_spec(environment), max_images=4, max_model_len=99)
        )
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (None, "gave NoneType, wanted a Task"),
        (Task(id="a", messages=(), answer=7), "answer is 7, wanted text"),  # ty: ignore[invalid-argument-type]
        (Task(id=3, messages=(), answer="7"), "id is 3, wanted text"),  # ty: ignore[invalid-argument-type]
        (Task(id="\ud800", messages=(), answer="7"), "id holds characters that cannot be written"),
        (Task(id="a", messages=({"role": "user"},), answer="7"), "a message is dict, wanted a Message"),  # ty: ignore[invalid-argument-type]
    ],
    ids=["nothing", "number as answer", "number as id", "surrogates", "dict as message"],
)
def test_a_task_that_is_none_fails_its_rollouts(task: Any, problem: str) -> None:
    class Wrong(OneTurn):
        def task(self, split: Split, index: int) -> Task:
            return task

    made, failure = make_task(Wrong(exact), "train", 5)
    assert failure is not None
    assert failure.reason == "environment_raised"
    assert problem in failure.message
    assert made.id == "train-5"
