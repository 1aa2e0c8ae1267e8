"""A small real engine: a Hugging Face model that samples in batches, with a KV cache, on a CPU or one GPU.

In: prompts with one placeholder per picture. Out: sampled ids with the logprobs of the distribution they were drawn
from (temperature and bans applied), the expanded prompt and the placeholder ranges. What holds:

* a distinct prompt is encoded and prefilled once, whatever number of answers it gets, and so is a distinct picture;
* a draw depends on the request's seed and the model only, not on what else is in the batch (up to float rounding of
  the logits);
* banned ids have probability zero.

Prompts of different lengths share a prefill as rows padded on the right: plain causal attention never looks at the
padding, and later tokens mask it out. Families that carry a state from token to token are padded on the left instead,
under a mask, so that the state is taken right behind the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import DynamicCache, PreTrainedModel

from latepix.errors import CheckpointError, ImageError, InferenceError
from latepix.families.base import ProcessedImage
from latepix.families.model_info import read_model_info
from latepix.families.registry import get_adapter
from latepix.inference.contract import GenerateRequest, SamplingParams
from latepix.trace.ingress import ImageLimits, InlineImage, ingest_image
from latepix.trace.refs import PlaceholderRange, expand_placeholders

#: Below, float32 logits overflow when they are divided by it; 0 itself is greedy.
_MIN_TEMPERATURE = 1e-3
_MAX_TEMPERATURE = 100.0


class BadRequest(InferenceError):
    """The request is wrong; the server answers HTTP 400."""

    reason = "bad_request"


class PreparedPrompt(msgspec.Struct, frozen=True):
    """A request whose pictures are processed and whose placeholders are expanded.

    Attributes:
        token_ids: [T] expanded prompt.
        ranges: one per picture slot.
        images: one per picture slot.
        position_ids: [A, T] int64.
        sampling: as requested, with `max_tokens` filled in and without bans that the engine makes anyway.
        key: equal for equal prompts.
    """

    token_ids: np.ndarray
    ranges: list[PlaceholderRange]
    images: list[tuple[str, ProcessedImage]]
    position_ids: np.ndarray
    sampling: SamplingParams
    key: tuple[bytes, tuple[str, ...]]


class Completion(msgspec.Struct):
    """One sampled answer."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str = "length"


class LocalEngine:
    """Holds a model and samples from it. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        model_path: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        max_model_len: int = 4096,
        limits: ImageLimits | None = None,
    ) -> None:
        self.info = read_model_info(model_path)
        self.adapter = get_adapter(self.info.model_type)
        self.device = device
        self.max_model_len = self.info.max_len(max_model_len)
        self.model: PreTrainedModel = self.adapter.load_model(model_path, dtype=dtype, device=device)
        self._processor = self.adapter.load_processor(model_path)
        self._limits = limits or ImageLimits()
        self._banned_ids = frozenset(self.info.banned_ids)
        self._banned = torch.tensor(self.info.banned_ids, dtype=torch.long, device=device)
        self._processed: dict[str, ProcessedImage] = {}

    def prepare(self, request: GenerateRequest) -> PreparedPrompt:
        """Decode and process the pictures of a request and expand its placeholders.

        Raises:
            BadRequest: counts, ids, lengths or sampling parameters are wrong.
        """
        others = set(self.info.placeholder_ids) - {self.info.image_placeholder_id}
        if not others.isdisjoint(request.token_ids):
            raise BadRequest(
                f"token_ids holds placeholders of another medium ({sorted(others.intersection(request.token_ids))}); "
                f"the local engine takes pictures only, placeholder {self.info.image_placeholder_id}."
            )
        num_slots = sum(token == self.info.image_placeholder_id for token in request.token_ids)
        if num_slots != len(request.content_parts):
            raise BadRequest(
                f"token_ids has {num_slots} media placeholders, content_parts has {len(request.content_parts)} "
                "entries. Send one placeholder per picture, unexpanded, and the pictures in the same order."
            )
        if not request.token_ids or not all(0 <= token < self.info.vocab_size for token in request.token_ids):
            raise BadRequest(f"token_ids must be non-empty and lie in [0, {self.info.vocab_size}).")
        images = [self._image(part, index) for index, part in enumerate(request.content_parts)]
        lengths = [image.num_tokens for _, image in images]
        token_ids, ranges = expand_placeholders(request.token_ids, lengths, self.info.placeholder_ids)
        types = np.zeros(len(token_ids), dtype=np.uint8)
        for placed in ranges:
            types[placed.offset : placed.offset + placed.length] = 1
        ids = np.asarray(token_ids, dtype=np.int64)
        return PreparedPrompt(
            token_ids=ids,
            ranges=ranges,
            images=images,
            position_ids=self.adapter.position_ids(types, [image.grid_thw for _, image in images], self.info),
            sampling=self._check_sampling(request.sampling_params, len(token_ids)),
            key=(ids.tobytes(), tuple(sha for sha, _ in images)),
        )

    def _image(self, part: dict[str, Any], index: int) -> tuple[str, ProcessedImage]:
        url = part.get("url") if part.get("type") == "image_url" else None
        if not isinstance(url, str):
            raise BadRequest(
                f'content_parts[{index}] must be {{"type": "image_url", "url": "data:..."}}; nested in image_url, as '
                "in a chat message, vLLM would not see the picture."
            )
        try:
            image = ingest_image(url, limits=self._limits)
            return image.sha256, self._process(image)
        except (ImageError, ValueError) as error:
            raise BadRequest(f"content_parts[{index}]: {error}") from error

    def _process(self, image: InlineImage) -> ProcessedImage:
        """Run the image processor, remembering the last few hundred pictures."""
        processed = self._processed.pop(image.sha256, None)
        if processed is None:
            processed = self.adapter.process_image(self._processor, image.open())
        self._processed[image.sha256] = processed
        while len(self._processed) > 256:
            self._processed.pop(next(iter(self._processed)))
        return processed

    def _check_sampling(self, sampling: SamplingParams, prompt_tokens: int) -> SamplingParams:
        room = self.max_model_len - prompt_tokens
        max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
        if max_tokens < 1 or max_tokens > room:
            raise BadRequest(
                f"The expanded prompt has {prompt_tokens} tokens and max_tokens is {sampling.max_tokens}; it must "
                f"be at least 1, and together they must fit into {self.max_model_len} (inference.max_model_len)."
            )
        if sampling.n < 1 or (sampling.seed is not None and sampling.seed < 0):
            raise BadRequest(f"n must be at least 1 and seed at least 0, got {sampling.n} and {sampling.seed}.")
        if sampling.temperature != 0 and not _MIN_TEMPERATURE <= sampling.temperature <= _MAX_TEMPERATURE:
            raise BadRequest(
                f"temperature must be 0 (greedy) or in [{_MIN_TEMPERATURE}, {_MAX_TEMPERATURE}], got "
                f"{sampling.temperature}."
            )
        if sampling.top_p != 1.0 or sampling.top_k not in (0, -1) or sampling.logprobs not in (None, 0, 1):
            raise BadRequest(
                "The local engine samples from the full distribution: top_p must be 1, top_k 0 and logprobs at most 1."
            )
        if any(bias > -100 for bias in sampling.logit_bias.values()):
            raise BadRequest("The local engine takes bans only: logit_bias values must be -100 or lower.")
        bans = self._check_bans(sampling.logit_bias)
        return msgspec.structs.replace(sampling, max_tokens=max_tokens, logit_bias=bans)

    def _check_bans(self, logit_bias: dict[str, float]) -> dict[str, float]:
        """Return the bans that go beyond the engine's own: clients repeat those, and each costs time in sampling."""
        vocab_size = self.info.vocab_size
        for key in logit_bias:
            if not (key.isascii() and key.isdigit() and len(key) < 10) or int(key) >= vocab_size:
                raise BadRequest(f"logit_bias: {key[:40]!r} is not a token id in [0, {vocab_size}).")
        bans = {key: bias for key, bias in logit_bias.items() if int(key) not in self._banned_ids}
        if len({int(key) for key in bans}) + len(self._banned_ids) == vocab_size:
            raise BadRequest("logit_bias bans every token that may be sampled.")
        return bans

    @torch.inference_mode()
    def generate(self, prompts: Sequence[PreparedPrompt]) -> list[list[Completion]]:
        """Sample the answers of a batch of prompts.

        Args:
            prompts: at least one.
        Returns:
            Per prompt, `sampling.n` completions.
        """
        distinct: dict[tuple[bytes, tuple[str, ...]], int] = {}
        for prompt in prompts:
            distinct.setdefault(prompt.key, len(distinct))
        firsts = {distinct[prompt.key]: prompt for prompt in reversed(prompts)}
        unique = [firsts[index] for index in range(len(distinct))]
        cache, logits, mask, next_positions = self._prefill(unique)
        sequences = [
            _Sequence(distinct[prompt.key], prompt.sampling, choice)
            for prompt in prompts
            for choice in range(prompt.sampling.n)
        ]
        self._decode(sequences, cache, logits, mask, next_positions)
        answers = iter(sequences)
        return [[next(answers).completion for _ in range(prompt.sampling.n)] for prompt in prompts]

    def _prefill(
        self, prompts: Sequence[PreparedPrompt]
    ) -> tuple[DynamicCache, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run distinct prompts; returns cache, logits [P, V] of the next token, mask [P, S], next positions [P]."""
        longest = max(len(prompt.token_ids) for prompt in prompts)
        policy = self.adapter.forward_policy
        # As in the trainer's rows: any id would do that is not a placeholder.
        ids = np.full((len(prompts), longest), self.info.stop_ids[0], dtype=np.int64)
        positions = np.zeros((policy.num_axes, len(prompts), longest), dtype=np.int64)
        filled = np.zeros((len(prompts), longest), dtype=np.int64)
        ends = []
        for row, prompt in enumerate(prompts):
            length = len(prompt.token_ids)
            start = longest - length if policy.is_recurrent else 0
            ids[row, start : start + length] = prompt.token_ids
            positions[:, row, start : start + length] = prompt.position_ids
            filled[row, start : start + length] = 1
            ends.append(start + length)
        mask = torch.from_numpy(filled).to(self.device)
        table: dict[str, int] = {}
        pictures: list[ProcessedImage] = []
        slot_images: list[int] = []
        for sha, image in (slot for prompt in prompts for slot in prompt.images):
            if table.setdefault(sha, len(pictures)) == len(pictures):
                pictures.append(image)
            slot_images.append(table[sha])
        cache = DynamicCache(config=self.model.config.get_text_config())
        hidden = self.adapter.forward_hidden(
            self.model,
            input_ids=torch.from_numpy(ids).to(self.device),
            position_ids=torch.from_numpy(positions).to(self.device),
            encoded=self.adapter.encode_images(self.model, pictures) if pictures else None,
            slot_images=slot_images,
            attention_mask=mask if policy.is_recurrent else None,
            cache=cache,
        )
        last = hidden[torch.arange(len(prompts), device=self.device), torch.tensor(ends, device=self.device) - 1]
        next_positions = torch.tensor(
            [int(prompt.position_ids.max()) + 1 for prompt in prompts], device=self.device, dtype=torch.long
        )
        return cache, self.adapter.lm_head(self.model, last), mask, next_positions

    def _decode(
        self,
        sequences: list[_Sequence],
        cache: DynamicCache,
        logits: torch.Tensor,
        mask: torch.Tensor,
        next_positions: torch.Tensor,
    ) -> None:
        """Sample until every sequence has stopped; finished ones leave the batch."""
        rows = torch.tensor([sequence.prompt for sequence in sequences], device=self.device)
        # Of the ways to choose rows of a cache, the one that layers with a state have too.
        cache.reorder_cache(cast("torch.LongTensor", rows))
        logits, mask, next_positions = logits[rows], mask[rows], next_positions[rows]
        active = list(sequences)
        axes = self.adapter.forward_policy.num_axes
        while True:
            tokens = self._sample(active, logits)
            keep = [row for row, sequence in enumerate(active) if not sequence.is_finished]
            if not keep:
                return
            if len(keep) < len(active):
                kept = torch.tensor(keep, device=self.device)
                cache.reorder_cache(cast("torch.LongTensor", kept))
                active = [active[row] for row in keep]
                tokens, mask, next_positions = tokens[kept], mask[kept], next_positions[kept]
            mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
            hidden = self.adapter.forward_hidden(
                self.model,
                input_ids=tokens[:, None],
                position_ids=next_positions[None, :, None].expand(axes, -1, 1),
                attention_mask=mask,
                cache=cache,
            )
            logits = self.adapter.lm_head(self.model, hidden[:, -1])
            next_positions = next_positions + 1

    def _sample(self, active: list[_Sequence], logits: torch.Tensor) -> torch.Tensor:
        """Draw the next token of every active sequence, and record it with its logprob; returns [B] ids."""
        logits = logits.float().index_fill(1, self._banned, -torch.inf)
        for row, sequence in enumerate(active):
            if sequence.extra_bans:
                logits[row, sequence.extra_bans] = -torch.inf
        temperatures = torch.tensor([s.sampling.temperature for s in active], device=logits.device)
        greedy = temperatures == 0
        logprobs = torch.log_softmax(logits / torch.where(greedy, 1.0, temperatures)[:, None], dim=-1)
        # Inverse of the cumulative distribution: one uniform number a token keeps draws independent of the batch.
        # The comparison is strict, so a token of probability zero is never chosen.
        cumulative = logprobs.double().exp().cumsum(dim=-1)
        if not bool(torch.isfinite(cumulative[:, -1]).all()):
            raise InferenceError("the model's logits are not finite: its weights are damaged, or training diverged")
        uniform = torch.tensor([[s.next_uniform()] for s in active], dtype=torch.float64, device=logits.device)
        drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]
        tokens = torch.where(greedy, logits.argmax(dim=-1), drawn)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        for sequence, token, logprob in zip(active, tokens.tolist(), chosen.tolist(), strict=True):
            sequence.append(token, logprob)
        return tokens

    def read_weights(self, path: Path) -> dict[str, torch.Tensor]:
        """Read a weights folder (safetensors).

        Raises:
            CheckpointError: it is missing or damaged.
        """
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{path} has no *.safetensors file to load weights from.")
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            try:
                tensors.update(load_file(file, device="cpu"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
        return tensors

    def load_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replace the model's weights; all or nothing.

        Raises:
            CheckpointError: they do not fit.
        """
        self.adapter.load_hub_state_dict(self.model, tensors)


class _Sequence:
    """One answer while it is sampled."""

    def __init__(self, prompt: int, sampling: SamplingParams, choice: int) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.extra_bans = [int(token) for token in sampling.logit_bias]
        self.completion = Completion(token_ids=[], logprobs=[])
        self.is_finished = False
        seed = None if sampling.seed is None else sampling.seed + choice
        self._uniforms = random.Random(seed)

    def next_uniform(self) -> float:
        return self._uniforms.random()

    def append(self, token: int, logprob: float) -> None:
        self.completion.token_ids.append(token)
        self.completion.logprobs.append(logprob)
        if token in self.sampling.stop_token_ids:
            self.completion.finish_reason = "stop"
            self.is_finished = True
        elif len(self.completion.token_ids) >= (self.sampling.max_tokens or 1):
            self.is_finished = True
