"""Play a task without a server: what a rollout would have asked of one, in tokens and bytes.

The prompts are rendered, extended and expanded as in a run. Every answer is the task's own, filled up with white space
to `sampling.max_tokens`: a policy that talks as long as it may is the worst case.
"""

from __future__ import annotations

import asyncio
import contextlib
import math

import msgspec
from PIL import Image

from latepix.config.schema import ImagesConfig, RunConfig
from latepix.environments.base import Environment, Task
from latepix.errors import ImageError, RolloutError
from latepix.families.model_info import ModelInfo
from latepix.inference.client import ANYWHERE, BAN_BIAS, Generation, Prompt, Routing, Sampling
from latepix.inference.contract import GenerateRequest, SamplingParams, image_part, version_label
from latepix.inference.render import MessageRenderer
from latepix.orchestrator.batch import prepare_batch, truncate_sample
from latepix.orchestrator.rollout import RolloutSpec, ServedPolicy, failure_of, make_task
from latepix.orchestrator.samples import trace_to_samples
from latepix.runs import picture_door
from latepix.trace.graph import RolloutFailure, Trace
from latepix.trace.ingress import ImageSource, InlineImage
from latepix.trace.training import encode_batch

#: The conversation is never cut by the policy: the sampler ends it, once it has seen the prompt that is too long.
_ANY_LENGTH = 1 << 31
#: Pictures whose size before the door is looked at; for most sources that means to decode them once more.
_MAX_RESIZES = 256


class DryTurn(msgspec.Struct, frozen=True):
    """One request that a rollout would have made.

    Attributes:
        prompt_tokens: of the expanded prompt.
        image_tokens: tokens of each of its pictures, in order.
        request_bytes: of the request's body.
    """

    prompt_tokens: int
    image_tokens: tuple[int, ...]
    request_bytes: int


class DryRollout(msgspec.Struct, frozen=True):
    """A task that was played without a server.

    Attributes:
        task_id: of the task.
        turns: the requests it would have made.
        wire_bytes: of one of its training samples; None if there is nothing to train.
        failure: set if it failed; what was played before still counts.
    """

    task_id: str
    turns: tuple[DryTurn, ...]
    wire_bytes: float | None = None
    failure: RolloutFailure | None = None

    @property
    def longest(self) -> DryTurn:
        """The turn with the longest prompt."""
        return max(self.turns, key=lambda turn: turn.prompt_tokens)


class Resize(msgspec.Struct, frozen=True):
    """A picture's (width, height) before and after the door, in pixels."""

    source: tuple[int, int]
    fitted: tuple[int, int]

    @property
    def factor(self) -> float:
        """By how much a side grew or shrank, the mean of both sides, at least 1."""
        factor = math.sqrt(math.prod(self.fitted) / math.prod(self.source))
        return max(factor, 1 / factor)


class MeasuringDoor:
    """The picture door of a run that also remembers how it resized.

    Attributes:
        resizes: one for each of the first pictures that came in.
    """

    def __init__(self, images: ImagesConfig, info: ModelInfo) -> None:
        self._door = picture_door(images, info)
        self._unfitted = picture_door(images.model_copy(update={"fit": False}), info)
        self.resizes: list[Resize] = []

    def __call__(self, source: ImageSource) -> InlineImage:
        """Take a picture in."""
        image = self._door(source)
        if len(self.resizes) < _MAX_RESIZES:
            # A URL that cannot be fetched a second time is not measured.
            with contextlib.suppress(ImageError):
                before = source if isinstance(source, Image.Image | InlineImage) else self._unfitted(source)
                self.resizes.append(Resize(source=(before.width, before.height), fitted=(image.width, image.height)))
        return image


class _OutOfRoom(RolloutError):
    """The conversation has no room for another token; the real policy would answer nothing from here on."""

    reason = "out_of_room"


class _DrySampler:
    """Notes every prompt and answers it without a server."""

    def __init__(self, renderer: MessageRenderer, task: Task, *, max_model_len: int) -> None:
        self._renderer = renderer
        self._answer_ids = renderer.tokenizer.encode(task.answer)
        # White space: whoever reads the answer finds the task's own.
        self._filler = renderer.tokenizer.encode(" ")[0]
        self._max_model_len = max_model_len
        self.turns: list[DryTurn] = []
        self.is_out_of_room = False

    async def generate(self, prompt: Prompt, sampling: Sampling, routing: Routing = ANYWHERE) -> Generation:
        """Note the prompt; answer with the task's answer, filled up to the limit of tokens.

        Raises:
            RolloutError: the prompt leaves no room for an answer.
        """
        # Lets a time limit take effect.
        await asyncio.sleep(0)
        info = self._renderer.info
        expanded, ranges = info.expand(prompt.token_ids, prompt.images)
        self.turns.append(
            DryTurn(
                prompt_tokens=len(expanded),
                image_tokens=tuple(placed.length for placed in ranges),
                request_bytes=request_bytes(prompt, sampling, info),
            )
        )
        if len(expanded) >= self._max_model_len:
            self.is_out_of_room = True
            raise _OutOfRoom(f"the prompt has {len(expanded)} tokens, the limit is {self._max_model_len}.")
        sampled, finish_reason = self._sample(sampling.max_tokens)
        return Generation(
            prompt_token_ids=expanded,
            ranges=ranges,
            token_ids=sampled,
            logprobs=[0.0] * len(sampled),
            finish_reason=finish_reason,
            policy_version=None,
        )

    def _sample(self, max_tokens: int) -> tuple[list[int], str]:
        missing = max_tokens - 1 - len(self._answer_ids)
        if missing < 0:
            return self._answer_ids[:max_tokens], "length"
        return [*self._answer_ids, *[self._filler] * missing, self._renderer.info.stop_ids[0]], "stop"


class DryPolicy(ServedPolicy):
    """Plays like `ServedPolicy`, without a server: says the task's answer, as long as an answer may be.

    Where the served policy would go on with empty answers because the model's length is full, it ends the rollout.
    """

    def __init__(self, renderer: MessageRenderer, task: Task, config: RunConfig) -> None:
        self.sampler = _DrySampler(renderer, task, max_model_len=max_model_len_of(config, renderer.info))
        spec = RolloutSpec(
            trace_id=f"dry-{task.id}",
            task=task,
            split="train",
            step=0,
            group_id=0,
            sampling=Sampling(temperature=config.sampling.temperature, max_tokens=config.sampling.max_tokens),
        )
        super().__init__(
            self.sampler, renderer, spec, max_images=config.images.max_per_prompt, max_model_len=_ANY_LENGTH
        )


def request_bytes(prompt: Prompt, sampling: Sampling, info: ModelInfo) -> int:
    """Return the size of the body that `InferenceClient` would send for one prompt."""
    request = GenerateRequest(
        token_ids=list(prompt.token_ids),
        content_parts=[image_part(msgspec.structs.replace(image, data=b"").url) for image in prompt.images],
        sampling_params=SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            stop_token_ids=list(info.stop_ids),
            logit_bias={str(token): BAN_BIAS for token in info.banned_ids},
            logprobs=0,
            detokenize=False,
        ),
        return_token_ids=True,
        cache_salt=version_label(0),
    )
    # Four characters for every three bytes; making the text itself would take longer than everything else here.
    return len(msgspec.json.encode(request)) + sum(4 * -(-image.num_bytes // 3) for image in prompt.images)


async def play_dry(environment: Environment, renderer: MessageRenderer, config: RunConfig, index: int) -> DryRollout:
    """Play one training task without a server.

    Raises:
        ConfigError: the environment says that a setting is wrong; that would end a run, too.
    """
    task, failure = make_task(environment, "train", index)
    if failure is not None:
        return DryRollout(task_id=task.id, turns=(), failure=failure)
    policy = DryPolicy(renderer, task, config)
    try:
        await environment.rollout(task, policy)
    except Exception as error:
        # Foreign code, as in `play`. A full conversation is no failure, whatever the environment makes of it.
        if not policy.sampler.is_out_of_room:
            failure = failure_of(error, f"environment {environment.name}, task {task.id}")
    trace = Trace(id="dry", environment=environment.name, task_id=task.id, nodes=policy.nodes)
    return DryRollout(
        task_id=task.id,
        turns=tuple(policy.sampler.turns),
        wire_bytes=_wire_bytes(trace, config) if failure is None else None,
        failure=failure,
    )


def _wire_bytes(trace: Trace, config: RunConfig) -> float | None:
    """Return what a sample of a whole group of such rollouts takes in a batch."""
    orchestrator = config.orchestrator
    samples = [truncate_sample(sample, orchestrator.seq_len) for sample in trace_to_samples(trace)]
    group = [sample for sample in samples if sample is not None] * orchestrator.group_size
    if not group:
        return None
    (batch,) = prepare_batch(
        group,
        step=0,
        micro_batch_tokens=orchestrator.micro_batch_tokens,
        micro_batch_image_tokens=orchestrator.micro_batch_image_tokens,
    )
    return len(encode_batch(batch)) / len(group)


def max_model_len_of(config: RunConfig, info: ModelInfo) -> int:
    """Return the most tokens that a conversation may have: the server's limit, or the model's own if that is lower."""
    return info.max_len(config.inference.max_model_len)
