"""Play one task with the served policy -> `Trace`. A bad rollout is data, not a crash."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import msgspec

from latepix.environments.base import Environment, Score, Split, Task
from latepix.errors import EnvError, ImageError, LatepixError, PlaceholderMismatch, RolloutError, reason_code
from latepix.inference.client import InferenceClient, Prompt, Sampling
from latepix.inference.render import MessageRenderer, RenderedPrompt
from latepix.trace.graph import RolloutFailure, Trace, TraceBuilder
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
        problem: set if the environment could not make the task; it is then not played.
    """

    trace_id: str
    task: Task
    split: Split
    step: int
    group_id: int
    sampling: Sampling
    problem: RolloutFailure | None = None


def make_task(environment: Environment, split: Split, index: int) -> tuple[Task, RolloutFailure | None]:
    """Ask the environment for a task; if it raises (a picture that is refused, say), its rollouts fail, not the run."""
    try:
        return environment.task(split, index), None
    except Exception as error:
        # Foreign code, like the rollout itself: whatever it raises belongs to this task alone.
        failure = _failure_of(error, f"environment {environment.name}, task {index} of split {split}")
        return Task(id=f"{split}-{index}", messages=(), answer=""), failure


def _failure_of(error: Exception, where: str) -> RolloutFailure:
    """Explain why a rollout failed; an error that is not a rollout's (a wrong config, say) is raised on."""
    if isinstance(error, RolloutError | PlaceholderMismatch | ImageError):
        return RolloutFailure(reason=reason_code(error), message=f"{where}: {error}")
    if isinstance(error, LatepixError):
        raise error
    return RolloutFailure(reason=EnvError.reason, message=f"{where}: {type(error).__name__}: {error}")


class ServedPolicy:
    """The policy behind a server, in one conversation; records every turn."""

    def __init__(
        self,
        client: InferenceClient,
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
        self._history: list[Message] = []
        self._images: list[InlineImage] = []
        self._num_turns = 0
        self._is_responding = False
        self.is_out_of_room = False
        self._last: tuple[list[int], list[int]] | None = None
        self.builder = TraceBuilder(spec.trace_id, renderer.info.placeholder_ids)

    async def respond(self, messages: Sequence[Message]) -> Message:
        """Add messages to the conversation and return the assistant's answer.

        Once the conversation has no room for another token the answer is empty, and the trace says so.

        Raises:
            EnvError: another answer of this conversation is still awaited.
        """
        if self._is_responding:
            raise EnvError("respond was called while another answer of the same conversation was awaited")
        self._is_responding = True
        try:
            return await self._respond(messages)
        finally:
            self._is_responding = False

    async def _respond(self, messages: Sequence[Message]) -> Message:
        if self.is_out_of_room:
            return Message(role="assistant")
        rendered, new = self._render(messages)
        images = [*self._images, *iter_images(messages)]
        if len(images) > self._max_images:
            raise ImageError(
                f"trace {self._spec.trace_id}, turn {self._num_turns}: {len(images)} pictures in the conversation, the "
                f"limit is {self._max_images} (images.max_per_prompt).",
                "too_many_images",
            )
        # Turns are far apart in seed space so that siblings' consecutive seeds never meet another turn's.
        seed = (self._spec.sampling.seed + self._num_turns * 1_000_003) % (1 << 31)
        image_tokens = sum(self._renderer.info.num_image_tokens(image) for image in images)
        room = self._max_model_len - (len(rendered.token_ids) - len(images) + image_tokens)
        if room < 1:
            self.is_out_of_room = True
            return Message(role="assistant")
        sampling = msgspec.structs.replace(
            self._spec.sampling, seed=seed, max_tokens=min(self._spec.sampling.max_tokens, room)
        )
        answer = await self._client.generate(
            Prompt(token_ids=tuple(rendered.token_ids), images=tuple(images)), sampling
        )
        self._check_lengths(images, [placed.length for placed in answer.ranges])
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
        )
        self._history = [*self._history, *messages, reply]
        self._images = images
        self._last = (rendered.token_ids, answer.token_ids)
        self._num_turns += 1
        return reply

    def _render(self, messages: Sequence[Message]) -> tuple[RenderedPrompt, Sequence[Message]]:
        """Return the prompt, and the messages whose tokens are new in it."""
        if self._last is not None:
            extended = self._renderer.extend(*self._last, messages)
            if extended is not None:
                return extended, messages
            # The template rewrites history: the old turns stay a branch of their own, the new prompt starts another.
            self.builder.start_branch()
        conversation = [*self._history, *messages]
        return self._renderer.render(conversation), conversation

    def _check_lengths(self, images: Sequence[InlineImage], lengths: Sequence[int]) -> None:
        for slot, (image, length) in enumerate(zip(images, lengths, strict=True)):
            expected = self._renderer.info.num_image_tokens(image)
            if expected != length:
                raise PlaceholderMismatch(
                    f"trace {self._spec.trace_id}, turn {self._num_turns}, picture {slot}: {image.width} x "
                    f"{image.height} pixels need {expected} tokens, the server placed {length}. Server and trainer use "
                    "different processor settings."
                )


async def play(
    environment: Environment,
    client: InferenceClient,
    renderer: MessageRenderer,
    spec: RolloutSpec,
    *,
    max_images: int,
    max_model_len: int,
) -> Trace:
    """Play one task; whatever goes wrong with this rollout is recorded on its trace.

    Args:
        environment, client, renderer: what plays.
        spec: what is played, and how.
        max_images: most pictures in the conversation.
        max_model_len: most tokens in the conversation; a longer one ends with empty answers.
    Returns:
        The trace, with a finite `reward`, or with `failure`.
    """
    policy = ServedPolicy(client, renderer, spec, max_images=max_images, max_model_len=max_model_len)
    failure = spec.problem
    score: Score | None = None
    if failure is None:
        try:
            score = await environment.rollout(spec.task, policy)
            _check_score(score)
        except Exception as error:
            # The rollout border: an environment is foreign code, whatever it raises belongs to this rollout alone.
            failure = _failure_of(error, f"environment {environment.name}, task {spec.task.id}")
            score = None
    return Trace(
        id=spec.trace_id,
        environment=environment.name,
        task_id=spec.task.id,
        step=spec.step,
        group_id=spec.group_id,
        split=spec.split,
        nodes=tuple(policy.builder.nodes),
        reward=float(score.reward) if score else None,
        reward_parts={name: float(value) for name, value in score.parts.items()} if score else {},
        failure=failure,
        is_out_of_room=policy.is_out_of_room,
        answer=spec.task.answer,
    )


def _check_score(score: Score) -> None:
    for name, value in [("reward", score.reward), *score.parts.items()]:
        if not isinstance(value, numbers.Real) or not -1e9 < value < 1e9:
            raise EnvError(f"the {name} is {value!r}; it must be a finite number below 1e9.")
