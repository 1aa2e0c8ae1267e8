"""Decode with cache = prefill: what the engine says of its samples = what the trainer says of them.

Mean mismatch KL below 1e-9 nats: logprobs that differ by 4e-5, the rounding of float32 logits of about 20.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from latepix.families.base import ProcessedImage
from latepix.families.qwen_vl import QwenVLAdapter
from latepix.families.tiny import TINY_FAMILIES
from latepix.inference.contract import GenerateRequest
from latepix.inference.local_engine import BadRequest, Completion, LocalEngine, PreparedPrompt
from latepix.trace.ingress import InlineImage, ingest_image
from latepix.trace.refs import MMRefs
from latepix.trace.training import TrainingSample
from tests.tiny.policy import Policy, draw, make_request, score

SMALL, WIDE, LARGE = draw(32, 32, seed=1), draw(96, 32, seed=2), draw(96, 64, seed=3)


@pytest.fixture(scope="module")
def engine(sharp_model: Path) -> LocalEngine:
    return LocalEngine(sharp_model, max_model_len=256)


def run(engine: LocalEngine, *requests: GenerateRequest) -> list[list[Completion]]:
    return engine.generate([engine.prepare(request) for request in requests])


def sample_of(
    prompt: PreparedPrompt, completion: Completion, pictures: Sequence[InlineImage], temperature: float
) -> TrainingSample:
    """Turn an answer of the engine into what the trainer gets."""
    num_prompt, num_new = len(prompt.token_ids), len(completion.token_ids)
    logprobs = np.zeros(num_prompt + num_new, np.float32)
    logprobs[num_prompt:] = completion.logprobs
    slots = [(picture, r.offset, r.length) for picture, r in zip(pictures, prompt.ranges, strict=True)]
    return TrainingSample(
        token_ids=np.concatenate([prompt.token_ids, completion.token_ids]).astype(np.int32),
        loss_mask=np.arange(num_prompt + num_new) >= num_prompt,
        inference_logprobs=logprobs,
        advantages=np.zeros(num_prompt + num_new, np.float32),
        mm_refs=MMRefs.from_slots(slots),
        temperature=temperature,
    )


def mismatch_kl(policy: Policy, samples: Sequence[TrainingSample]) -> tuple[float, int]:
    """Return the mean mismatch KL over all sampled tokens, and their number."""
    with torch.no_grad():
        theirs = score(policy, samples).trainer_logprobs.double().numpy()
    ours = np.concatenate([sample.inference_logprobs[sample.loss_mask] for sample in samples]).astype(np.float64)
    log_ratio = theirs - ours
    return float(np.mean(np.expm1(log_ratio) - log_ratio)), len(log_ratio)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_engine_logprobs_equal_trainer_logprobs(
    sharp_family: Callable[[str], Path],
    family_policy: Callable[[str], Policy],
    family: str,
    temperature: float,
) -> None:
    engine, policy = LocalEngine(sharp_family(family), max_model_len=256), family_policy(family)
    how = {"temperature": temperature, "max_tokens": 12, "n": 3, "stop_token_ids": list(engine.info.stop_ids)}
    prompts: list[tuple[int | InlineImage, ...]] = [
        (9,),
        (3, SMALL, 4),
        (LARGE, 2, WIDE, 1, LARGE, 5),
        (1, SMALL, SMALL, 3),
        (40, WIDE),
        (2,),
    ]
    requests = [make_request(engine.info, *p, seed=i, sampling_seed=100 * i, **how) for i, p in enumerate(prompts)]
    prepared = [engine.prepare(request) for request in requests]
    samples = [
        sample_of(prompt, completion, [part for part in parts if not isinstance(part, int)], temperature)
        for prompt, parts, completions in zip(prepared, prompts, engine.generate(prepared), strict=True)
        for completion in completions
    ]
    kl, count = mismatch_kl(policy, samples)
    assert count > 150
    assert kl < 1e-9
    # The test could tell: scored at another temperature the same samples do not agree.
    others = [
        sample_of(p, c, [], 0.9) for p, cs in zip(prepared[:1], [run(engine, requests[0])[0]], strict=True) for c in cs
    ]
    assert mismatch_kl(policy, others)[0] > 1e-4


def test_a_prompts_draws_do_not_depend_on_its_batch_mates(engine: LocalEngine) -> None:
    requests = [
        make_request(engine.info, 4, WIDE, 3, seed=1, sampling_seed=5, n=2, max_tokens=10),
        make_request(engine.info, 30, seed=2, sampling_seed=9, max_tokens=14),
        make_request(engine.info, SMALL, 1, LARGE, 2, seed=3, sampling_seed=5, max_tokens=3, temperature=0.5),
        make_request(engine.info, 2, seed=4, sampling_seed=5, max_tokens=10, n=3),
    ]
    together = run(engine, *requests)
    for request, answers in zip(requests, together, strict=True):
        (alone,) = run(engine, request)
        assert [answer.token_ids for answer in alone] == [answer.token_ids for answer in answers]
        for one, other in zip(alone, answers, strict=True):
            # Rows of a batched matrix product are rounded differently.
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
    assert together[0] != run(
        engine, make_request(engine.info, 4, SMALL, 3, seed=1, sampling_seed=5, n=2, max_tokens=10)
    )


def test_the_same_seed_gives_the_same_tokens_and_another_one_others(engine: LocalEngine) -> None:
    one, same, other, unseeded, again = (
        run(engine, make_request(engine.info, 4, SMALL, 3, max_tokens=12, **seeded))[0][0].token_ids
        for seeded in ({"sampling_seed": 3}, {"sampling_seed": 3}, {"sampling_seed": 4}, {}, {})
    )
    assert one == same
    assert one != other
    assert unseeded != again


def test_n_answers_are_n_requests_with_the_following_seeds(engine: LocalEngine) -> None:
    (together,) = run(engine, make_request(engine.info, 4, SMALL, 3, sampling_seed=7, n=5, max_tokens=6))
    apart = [
        run(engine, make_request(engine.info, 4, SMALL, 3, sampling_seed=7 + i, max_tokens=6))[0][0] for i in range(5)
    ]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in apart]
    assert len({tuple(answer.token_ids) for answer in together}) == 5


@pytest.mark.parametrize("parts", [(8,), (3, WIDE, 2, LARGE, 4), (SMALL, 1)])
def test_greedy_answers_equal_hugging_faces_generate(
    engine: LocalEngine, policy: Policy, parts: tuple[int | InlineImage, ...]
) -> None:
    request = make_request(engine.info, *parts, temperature=0.0, max_tokens=10)
    prompt = engine.prepare(request)
    ((ours,),) = engine.generate([prompt])
    types = np.zeros((1, len(prompt.token_ids)), np.int64)
    for placed in prompt.ranges:
        types[0, placed.offset : placed.offset + placed.length] = 1
    pictures: dict[str, torch.Tensor] = {}
    if prompt.images:
        pictures = {
            "pixel_values": torch.cat([image.pixel_values for _, image in prompt.images]),
            "image_grid_thw": torch.tensor([image.grid_thw for _, image in prompt.images]),
        }
    model: Any = policy.model
    with torch.no_grad():
        wanted = model.generate(
            input_ids=torch.from_numpy(prompt.token_ids)[None],
            attention_mask=torch.ones(1, len(prompt.token_ids), dtype=torch.long),
            mm_token_type_ids=torch.from_numpy(types),
            do_sample=False,
            max_new_tokens=10,
            min_new_tokens=10,
            suppress_tokens=list(engine.info.banned_ids),
            **pictures,
        )[0, len(prompt.token_ids) :].tolist()
    assert len(set(wanted)) > 2
    assert ours.token_ids == wanted


def test_sampling_stops_at_a_stop_id_which_is_part_of_the_answer(engine: LocalEngine) -> None:
    ((free,),) = run(engine, make_request(engine.info, 4, SMALL, 3, sampling_seed=1, max_tokens=9))
    stop = free.token_ids[4]
    first = free.token_ids.index(stop) + 1
    how: dict[str, Any] = {"sampling_seed": 1, "max_tokens": 9, "stop_token_ids": [stop]}
    (stopped,), (other,) = run(
        engine,
        make_request(engine.info, 4, SMALL, 3, **how),
        make_request(engine.info, 4, SMALL, 3, sampling_seed=1, max_tokens=9),
    )
    assert stopped.token_ids == free.token_ids[:first]
    assert stopped.finish_reason == "stop"
    assert len(stopped.logprobs) == first
    # Its batch mate goes on as if nothing had happened.
    assert (other.token_ids, other.finish_reason) == (free.token_ids, "length")


def test_max_tokens_bounds_an_answer_and_defaults_to_the_models_length(sharp_model: Path) -> None:
    engine = LocalEngine(sharp_model, max_model_len=20)
    prompt: tuple[int | InlineImage, ...] = (3, LARGE, 4)
    ((one,), (rest,)) = run(
        engine, make_request(engine.info, *prompt, max_tokens=1), make_request(engine.info, *prompt, sampling_seed=2)
    )
    assert (len(one.token_ids), one.finish_reason) == (1, "length")
    assert (len(rest.token_ids), rest.finish_reason) == (20 - 13, "length")
    with pytest.raises(BadRequest, match="expanded prompt has 13 tokens and max_tokens is 8"):
        engine.prepare(make_request(engine.info, *prompt, max_tokens=8))
    with pytest.raises(BadRequest, match="must fit into 20"):
        engine.prepare(make_request(engine.info, 20))


def test_banned_ids_are_never_sampled_although_the_model_wants_nothing_else(sharp_model: Path) -> None:
    engine = LocalEngine(sharp_model)
    placeholder = engine.info.image_placeholder_id
    requests = [make_request(engine.info, *p, sampling_seed=0, n=1000, max_tokens=1) for p in ((5,), (3, SMALL, 2))]
    # Point the placeholder's output row along the hidden state that is about to choose. The embedding is tied, but a
    # placeholder's own embedding is always replaced by its picture.
    weight = engine.model.get_output_embeddings().weight
    for request in requests:
        prompt = engine.prepare(request)
        hidden = last_hidden(engine, prompt)
        with torch.no_grad():
            weight[placeholder] = 5 * hidden
        wanted = torch.softmax(engine.adapter.lm_head(engine.model, hidden), dim=-1)[placeholder]
        assert wanted > 0.999
        (answers,) = engine.generate([prompt])
        drawn = {answer.token_ids[0] for answer in answers}
        assert len(drawn) > 5
        assert drawn.isdisjoint(engine.info.banned_ids)
        assert all(np.isfinite(answer.logprobs[0]) for answer in answers)
        ((greedy,),) = run(engine, make_request(engine.info, 5, temperature=0.0, max_tokens=1))
        assert greedy.token_ids[0] not in engine.info.banned_ids


def last_hidden(engine: LocalEngine, prompt: PreparedPrompt) -> torch.Tensor:
    with torch.no_grad():
        images = [image for _, image in prompt.images]
        hidden = engine.adapter.forward_hidden(
            engine.model,
            input_ids=torch.from_numpy(prompt.token_ids)[None],
            position_ids=torch.from_numpy(prompt.position_ids)[:, None],
            encoded=engine.adapter.encode_images(engine.model, images) if images else None,
            slot_images=range(len(images)),
        )
    return hidden[0, -1]


def test_ids_banned_by_a_request_are_banned_for_it_alone(engine: LocalEngine) -> None:
    ((free,),) = run(engine, make_request(engine.info, 4, SMALL, 3, temperature=0.0, max_tokens=1))
    favourite = free.token_ids[0]
    (banned,), (other,) = run(
        engine,
        make_request(engine.info, 4, SMALL, 3, temperature=0.0, max_tokens=1, logit_bias={str(favourite): -100.0}),
        make_request(engine.info, 4, SMALL, 3, temperature=0.0, max_tokens=1),
    )
    assert banned.token_ids[0] != favourite
    assert other.token_ids[0] == favourite
    # Clients repeat the engine's own bans; only what goes beyond them is left to do.
    every = dict.fromkeys(map(str, [favourite, *engine.info.banned_ids]), -100.0)
    prompt = engine.prepare(make_request(engine.info, 4, SMALL, 3, temperature=0.0, max_tokens=1, logit_bias=every))
    assert prompt.sampling.logit_bias == {str(favourite): -100.0}
    assert engine.generate([prompt]) == [[banned]]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_frequencies_match_the_probabilities(engine: LocalEngine, temperature: float) -> None:
    num_draws = 4000
    request = make_request(
        engine.info, 3, SMALL, 4, n=num_draws, max_tokens=1, sampling_seed=0, temperature=temperature
    )
    prompt = engine.prepare(request)
    logits = engine.adapter.lm_head(engine.model, last_hidden(engine, prompt)).double()
    logits[list(engine.info.banned_ids)] = -torch.inf
    probabilities = torch.softmax(logits / temperature, dim=-1).detach().numpy()
    (answers,) = engine.generate([prompt])
    counts = np.bincount([answer.token_ids[0] for answer in answers], minlength=len(probabilities))
    for answer in answers[:50]:
        assert answer.logprobs[0] == pytest.approx(np.log(probabilities[answer.token_ids[0]]), abs=2e-5)
    # Pearson's chi-square over ids expected at least ten times, the rest in one bin: within 4 standard deviations.
    common = num_draws * probabilities >= 10
    expected = np.append(num_draws * probabilities[common], num_draws * probabilities[~common].sum())
    observed = np.append(counts[common], counts[~common].sum())
    freedom = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert freedom >= 5
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)


def test_equal_prompts_are_prefilled_once_and_equal_pictures_encoded_once(sharp_model: Path) -> None:
    engine = LocalEngine(sharp_model)
    counting = engine.adapter = CountingAdapter()
    requests = [
        *(make_request(engine.info, 3, SMALL, 2, seed=1, n=4, sampling_seed=10 * i, max_tokens=2) for i in range(3)),
        make_request(engine.info, 5, SMALL, 1, WIDE, 1, seed=2, max_tokens=2),
    ]
    answers = run(engine, *requests)
    assert [len(completions) for completions in answers] == [4, 4, 4, 1]
    # Two distinct prompts and two distinct pictures, whatever is asked of them; then one step for 13 sequences.
    assert counting.rows == [2, 13]
    assert counting.encoded == [2]


class CountingAdapter(QwenVLAdapter):
    """The adapter with a tally of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.encoded: list[int] = []

    def forward_hidden(self, model: PreTrainedModel, *, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        self.rows.append(len(input_ids))
        return super().forward_hidden(model, input_ids=input_ids, **inputs)

    def encode_images(self, model: PreTrainedModel, images: Sequence[ProcessedImage]) -> Any:
        self.encoded.append(len(images))
        return super().encode_images(model, images)


def test_a_resized_picture_gets_the_processors_count(engine: LocalEngine) -> None:
    picture = ingest_image(draw(50, 100, seed=9).open())
    prompt = engine.prepare(make_request(engine.info, 2, picture, 1, max_tokens=1))
    (placed,) = prompt.ranges
    assert (placed.offset, placed.length) == (2, engine.info.num_image_tokens(picture))
    assert prompt.token_ids[2 : 2 + placed.length].tolist() == [engine.info.image_placeholder_id] * placed.length
