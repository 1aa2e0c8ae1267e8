"""Play one task with the served policy -> `Trace`. A bad rollout is data, not a crash."""

from __future__ import annotations

import asyncio
import numbers
from collections.abc import Sequence
from typing import Protocol

import msgspec

from latepix.environments.base import Environment, Score, Split, Task, checked_task, plain_text
from latepix.errors import (
    EnvError,
    ImageError,
    LatepixError,
    PlaceholderMismatch,
    RolloutError,
    RolloutTimeout,
    reason_code,
)
from latepix.families.model_info import ModelInfo
from latepix.inference.client import ANYWHERE, Generation, Prompt, Routing, Sampling
from latepix.inference.render import MessageRenderer, RenderedPrompt
from latepix.orchestrator.batch import validate_sample
from latepix.orchestrator.samples import trace_to_samples
from latepix.trace.graph import MessageNode, Position, RolloutFailure, Trace, TraceBuilder
from latepix.trace.ingress import InlineImage
from latepix.trace.messages import Message, iter_images


class RolloutSpec(msgspec.Struct, frozen=True):
    """What is played, and how.

    Attributes:
        trace_id: unique in the run.
        task: what to do.
        split: where the task comes from.
        step: training step, or policy version for an evaluation.
        group_id: siblings share it.
        sampling: `seed` is that of the first turn; later turns continue from it.
        task_index: of the task in its split; -1 if not known, and then the trace cannot be replayed.
        problem: set if the environment could not make the task; it is then not played.
        routing: where its requests go.
    """

    trace_id: str
    task: Task
    split: Split
    step: int
    group_id: int
    sampling: Sampling
    task_index: int = -1
    problem: RolloutFailure | None = None
    routing: Routing = ANYWHERE


def make_task(environment: Environment, split: Split, index: int) -> tuple[Task, RolloutFailure | None]:
    """Ask the environment for a task; if it raises (a picture that is refused, say), its rollouts fail, not the run."""
    try:
        return checked_task(environment, split, index), None
    except (Exception, SystemExit) as error:
        # Foreign code, like the rollout itself: whatever it raises belongs to this task alone.
        failure = failure_of(error, f"environment {environment.name}, task {index} of split {split}")
        return Task(id=f"{split}-{index}", messages=(), answer=""), failure


def failure_of(error: BaseException, where: str) -> RolloutFailure:
    """Explain why a rollout failed; an error that is not a rollout's (a wrong config, say) is raised on."""
    if isinstance(error, RolloutError | PlaceholderMismatch | ImageError):
        return RolloutFailure(reason=reason_code(error), message=plain_text(f"{where}: {error}"))
    if isinstance(error, LatepixError):
        raise error
    return RolloutFailure(reason=EnvError.reason, message=plain_text(f"{where}: {type(error).__name__}: {error}"))


class _Turn(msgspec.Struct, frozen=True):
    """A turn that was played: the conversation with its answer, the prompt as sent, and where the trace stands."""

    conversation: tuple[Message, ...]
    prompt_ids: list[int]
    sampled_ids: list[int]
    position: Position


class Sampler(Protocol):
    """Draws answers: the client of a server, or a stand-in."""

    async def generate(self, prompt: Prompt, sampling: Sampling, routing: Routing = ANYWHERE) -> Generation:
        """Sample one answer."""
        ...


class ServedPolicy:
    """The policy behind a server, in one conversation; records every turn."""

    def __init__(
        self,
        client: Sampler,
        renderer: MessageRenderer,
        spec: RolloutSpec,
        *,
        max_images: int,
        max_model_len: int,
    ) -> None:
        self._client = client
        self._renderer = renderer
        self._spec = spec
        self._max_images = max_images
        self._max_model_len = max_model_len
        self._turns: list[_Turn] = []
        self._last: _Turn | None = None
        self._is_responding = False
        self.is_out_of_room = False
        self.builder = TraceBuilder(spec.trace_id, renderer.info.placeholder_ids)

    @property
    def nodes(self) -> tuple[MessageNode, ...]:
        """The message graph so far."""
        return tuple(self.builder.nodes)

    async def respond(self, messages: Sequence[Message], *, history: Sequence[Message] | None = None) -> Message:
        """Add messages to the conversation and return the assistant's answer.

        Args:
            messages: what is new.
            history: replaces the conversation so far (edited history, a second attempt, a sub-agent with a context of
                its own). What it shares with earlier branches is stored and trained once.

        Once the conversation has no room for another token the answer is empty, and the trace says so.

        Raises:
            EnvError: another answer of this conversation is still awaited.
        """
        if self._is_responding:
            raise EnvError("respond was called while another answer of the same conversation was awaited")
        self._is_responding = True
        try:
            return await self._respond(messages, history)
        finally:
            self._is_responding = False

    async def _respond(self, messages: Sequence[Message], history: Sequence[Message] | None) -> Message:
        if self.is_out_of_room:
            return Message(role="assistant")
        if history is None:
            history = self._last.conversation if self._last else ()
        conversation = (*history, *messages)
        rendered, new = self._render(conversation)
        images = tuple(iter_images(conversation))
        where = f"trace {self._spec.trace_id}, turn {len(self._turns)}"
        if len(images) > self._max_images:
            raise ImageError(
                f"{where}: {len(images)} pictures in the conversation, the limit is {self._max_images} "
                "(images.max_per_prompt).",
                "too_many_images",
            )
        image_tokens = sum(self._renderer.info.num_image_tokens(image) for image in images)
        room = self._max_model_len - (len(rendered.token_ids) - len(images) + image_tokens)
        if room < 1:
            self.is_out_of_room = True
            return Message(role="assistant")
        answer = await self._client.generate(
            Prompt(token_ids=tuple(rendered.token_ids), images=images), self._sampling(room), self._spec.routing
        )
        self._check_lengths(images, [placed.length for placed in answer.ranges], where)
        reply = self._renderer.parse(rendered.token_ids, answer.token_ids)
        self.builder.commit_turn(
            messages=new,
            message_ends=rendered.message_ends,
            logical_ids=rendered.token_ids,
            effective_ids=answer.prompt_token_ids,
            ranges=answer.ranges,
            reply=reply,
            sampled_ids=answer.token_ids,
            logprobs=answer.logprobs,
            policy_version=answer.policy_version,
            finish_reason=answer.finish_reason,
            policy_spans=answer.policy_spans if len(answer.policy_spans) > 1 else (),
        )
        self._last = _Turn(
            conversation=(*conversation, reply),
            prompt_ids=rendered.token_ids,
            sampled_ids=answer.token_ids,
            position=self.builder.position(),
        )
        self._turns.append(self._last)
        return reply

    def _sampling(self, room: int) -> Sampling:
        # Turns are far apart in seed space so that siblings' consecutive seeds never meet another turn's.
        seed = (self._spec.sampling.seed + len(self._turns) * 1_000_003) % (1 << 31)
        return msgspec.structs.replace(
            self._spec.sampling, seed=seed, max_tokens=min(self._spec.sampling.max_tokens, room)
        )

    def _render(self, conversation: tuple[Message, ...]) -> tuple[RenderedPrompt, Sequence[Message]]:
        """Return the prompt, and the messages whose tokens are new in it.

        A conversation that goes on from a played turn extends that turn's own tokens, so that what was sampled is never
        tokenized again. Any other one (and one whose template rewrites history) is rendered anew, as a new branch.
        """
        for turn in reversed(self._turns):
            played = len(turn.conversation)
            if conversation[:played] != turn.conversation:
                continue
            extended = self._renderer.extend(turn.prompt_ids, turn.sampled_ids, conversation[played:])
            if extended is None:
                break
            self.builder.go_back(turn.position)
            return extended, conversation[played:]
        self.builder.go_back()
        return self._renderer.render(conversation), conversation

    def _check_lengths(self, images: Sequence[InlineImage], lengths: Sequence[int], where: str) -> None:
        for slot, (image, length) in enumerate(zip(images, lengths, strict=True)):
            expected = self._renderer.info.num_image_tokens(image)
            if expected != length:
                raise PlaceholderMismatch(
                    f"{where}, picture {slot}: {image.width} x {image.height} pixels need {expected} tokens, the "
                    f"server placed {length}. Server and trainer use different processor settings."
                )


async def play(
    environment: Environment,
    client: Sampler,
    renderer: MessageRenderer,
    spec: RolloutSpec,
    *,
    max_images: int,
    max_model_len: int,
    timeout_s: float = 600.0,
) -> Trace:
    """Play one task; whatever goes wrong with this rollout is recorded on its trace.

    Args:
        environment, client, renderer: what plays.
        spec: what is played, and how.
        max_images: most pictures in the conversation.
        max_model_len: most tokens in the conversation; a longer one ends with empty answers.
        timeout_s: most seconds the rollout may take.
    Returns:
        The trace, with a finite `reward`, or with `failure`.
    """
    policy = ServedPolicy(client, renderer, spec, max_images=max_images, max_model_len=max_model_len)
    failure = spec.problem
    score: Score | None = None
    if failure is None:
        try:
            async with asyncio.timeout(timeout_s):
                score = await play_out(environment, policy, spec.task, renderer.info)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            # The rollout border: an environment is foreign code, whatever it raises belongs to this rollout alone. A
            # cancellation does, too, unless it is ours.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            failure = failure_of(_explained(error, timeout_s), f"environment {environment.name}, task {spec.task.id}")
            score = None
    return Trace(
        id=spec.trace_id,
        environment=environment.name,
        task_id=spec.task.id,
        step=spec.step,
        group_id=spec.group_id,
        split=spec.split,
        nodes=policy.nodes,
        reward=float(score.reward) if score else None,
        reward_parts={name: float(value) for name, value in score.parts.items()} if score else {},
        failure=failure,
        is_out_of_room=policy.is_out_of_room,
        answer=spec.task.answer,
        task_index=spec.task_index,
        seed=spec.sampling.seed,
        temperature=spec.sampling.temperature,
    )


def _explained(error: BaseException, timeout_s: float) -> BaseException:
    if isinstance(error, TimeoutError):
        return RolloutTimeout(f"no end after {timeout_s:g} s (orchestrator.rollout_timeout_s) ({error})")
    return error


async def play_out(environment: Environment, policy: ServedPolicy, task: Task, info: ModelInfo) -> Score:
    """Play one task to its end and check what came of it; whatever goes wrong is raised.

    Raises:
        Exception: of any kind: an environment is foreign code.
    """
    score = await environment.rollout(task, policy)
    _check_score(score)
    trace = Trace(id=policy.builder.trace_id, environment=environment.name, task_id=task.id, nodes=policy.nodes)
    for sample in trace_to_samples(trace):
        validate_sample(sample, info)
    return score


def _check_score(score: Score) -> None:
    if not isinstance(score, Score):
        raise EnvError(f"the rollout gave {score!r}, wanted a Score")
    for name, value in [("reward", score.reward), *score.parts.items()]:
        if not isinstance(value, numbers.Real) or not -1e9 < value < 1e9:
            raise EnvError(f"the {name} is {value!r}; it must be a finite number below 1e9.")
