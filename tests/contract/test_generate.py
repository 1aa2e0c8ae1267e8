"""Tokens and pictures in, tokens and logprobs out: what the client relies on, asked of both servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from latepix.errors import InferenceError, PlaceholderMismatch
from latepix.inference.client import Generation, InferenceClient, Prompt, Routing, Sampling
from latepix.inference.control import ServerControl
from latepix.trace.graph import PolicySpan
from latepix.trace.ingress import InlineImage
from latepix.trace.refs import MMRefs, expand_placeholders
from latepix.trace.training import TrainingSample
from tests.tiny.policy import Part, Policy, draw, score, text_ids
from tests.tiny.running import RunningServer

ONE, TWO = draw(64, 32, seed=1), draw(96, 64, seed=2)
PROMPTS: dict[str, tuple[Part, ...]] = {
    "text": (9,),
    "picture": (3, ONE, 5),
    "picture first": (ONE, 4),
    "picture last": (4, TWO),
    "two pictures": (2, ONE, 3, TWO, 2),
    "two that touch": (2, ONE, TWO, 2),
    "the same twice": (2, ONE, 3, ONE, 2),
}


def make_prompt(server: RunningServer, *parts: Part, seed: int = 0) -> Prompt:
    info, rng = server.info, np.random.default_rng([seed, 11])
    ids: list[int] = []
    for part in parts:
        ids += text_ids(info, part, rng) if isinstance(part, int) else [info.image_placeholder_id]
    return Prompt(token_ids=tuple(ids), images=tuple(part for part in parts if isinstance(part, InlineImage)))


def generate(
    server: RunningServer, *requests: tuple[Prompt, Sampling], routing: Routing | None = None
) -> list[Generation]:
    async def use(client: InferenceClient, control: ServerControl) -> list[Generation]:
        how = routing or Routing()
        return await asyncio.gather(*(client.generate(prompt, sampling, how) for prompt, sampling in requests))

    return server.use(use)


def trainer_logprobs(
    policy: Policy, prompts: Sequence[Prompt], answers: Sequence[Generation], temperature: float
) -> list[np.ndarray]:
    """Return the trainer's logprobs of the sampled tokens, answer by answer."""
    samples = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = np.asarray([*answer.prompt_token_ids, *answer.token_ids], dtype=np.int32)
        slots = [(image, r.offset, r.length) for image, r in zip(prompt.images, answer.ranges, strict=True)]
        zeros = np.zeros(len(ids), dtype=np.float32)
        samples.append(
            TrainingSample(
                token_ids=ids,
                loss_mask=np.arange(len(ids)) >= len(answer.prompt_token_ids),
                inference_logprobs=zeros,
                advantages=zeros,
                mm_refs=MMRefs.from_slots(slots),
                temperature=temperature,
            )
        )
    with torch.no_grad():
        outputs = score(policy, samples)
    ends = np.cumsum([len(answer.token_ids) for answer in answers])[:-1]
    return np.split(outputs.trainer_logprobs.numpy(), ends)


@pytest.mark.parametrize("parts", PROMPTS.values(), ids=PROMPTS.keys())
def test_the_prompt_comes_back_expanded_with_its_ranges(server: RunningServer, parts: tuple[Part, ...]) -> None:
    prompt = make_prompt(server, *parts)
    (answer,) = generate(server, (prompt, Sampling(1.0, 1)))
    lengths = [server.info.num_image_tokens(image) for image in prompt.images]
    ids, ranges = expand_placeholders(prompt.token_ids, lengths, server.info.placeholder_ids)
    assert answer.prompt_token_ids == ids
    assert answer.ranges == ranges


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_are_the_trainers_at_any_temperature(
    server: RunningServer, policy: Policy, temperature: float
) -> None:
    prompts = [make_prompt(server, *parts, seed=seed) for seed in range(3) for parts in PROMPTS.values()]
    answers = generate(server, *((prompt, Sampling(temperature, 12, seed=5)) for prompt in prompts))
    differences = [
        np.abs(ours - np.asarray(answer.logprobs)).max()
        for ours, answer in zip(trainer_logprobs(policy, prompts, answers, temperature), answers, strict=True)
    ]
    # Both sides compute in float32, in another order: measured up to 4e-5 on logits of size 30.
    assert max(differences) < 2e-4


def test_banned_ids_are_never_sampled(server: RunningServer) -> None:
    # So hot that every id that may be drawn is.
    answers = generate(server, *((make_prompt(server, 3, ONE, 5), Sampling(2.0, 40, seed=seed)) for seed in range(32)))
    drawn = {token for answer in answers for token in answer.token_ids}
    assert len(drawn) > 100
    assert not drawn & set(server.info.banned_ids)


def test_a_seed_repeats_its_answer_and_others_differ(server: RunningServer) -> None:
    prompt = make_prompt(server, 3, ONE, 5)
    first, again = (generate(server, *((prompt, Sampling(1.6, 12, seed=seed)) for seed in range(4))) for _ in range(2))
    assert [answer.token_ids for answer in first] == [answer.token_ids for answer in again]
    assert len({tuple(answer.token_ids) for answer in first}) == 4


def test_answer_i_of_a_joined_request_is_that_of_seed_plus_i_alone(server: RunningServer) -> None:
    prompt = make_prompt(server, 3, ONE, 5)
    together = generate(server, *((prompt, Sampling(1.6, 12, seed=seed)) for seed in range(10, 14)))
    alone = [generate(server, (prompt, Sampling(1.6, 12, seed=seed)))[0] for seed in range(10, 14)]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]


def test_temperature_zero_takes_the_most_likely_token(server: RunningServer, policy: Policy) -> None:
    prompt = make_prompt(server, 3, ONE, 5)
    (greedy,) = generate(server, (prompt, Sampling(0.0, 8)))
    (ours,) = trainer_logprobs(policy, [prompt], [greedy], 1.0)
    # Greedy logprobs are those of temperature 1.
    assert np.abs(ours - np.asarray(greedy.logprobs)).max() < 2e-4
    others = generate(server, *((prompt, Sampling(1.0, 1, seed=seed)) for seed in range(32)))
    assert max(answer.logprobs[0] for answer in others) <= greedy.logprobs[0] + 2e-4


def test_an_answer_ends_at_a_stop_id_or_at_its_length(server: RunningServer) -> None:
    answers = generate(server, *((make_prompt(server, 3, ONE, 5), Sampling(2.0, 60, seed=seed)) for seed in range(64)))
    stops = set(server.info.stop_ids)
    for answer in answers:
        *before, last = answer.token_ids
        assert not stops.intersection(before)
        assert answer.finish_reason == ("stop" if last in stops else "length")
        assert (len(answer.token_ids) == 60) or last in stops
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}


def test_answers_name_the_weights_that_sampled_them(server: RunningServer) -> None:
    async def use(client: InferenceClient, control: ServerControl) -> Generation:
        await control.set_weight_version("step-5")
        return await client.generate(make_prompt(server, 3, ONE), Sampling(1.0, 4))

    answer = server.use(use)
    assert answer.policy_version == 5
    assert answer.policy_spans == (PolicySpan(5, 0, len(answer.token_ids)),)


def test_routing_is_accepted(server: RunningServer) -> None:
    prompt = make_prompt(server, 3, ONE)
    (answer,) = generate(server, (prompt, Sampling(1.0, 2)), routing=Routing(data_parallel_rank=0))
    assert answer.token_ids


def refusal(server: RunningServer, prompt: Prompt, sampling: Sampling = Sampling(1.0, 2)) -> str:  # noqa: B008
    with pytest.raises((InferenceError, PlaceholderMismatch)) as caught:
        generate(server, (prompt, sampling))
    # Whatever was wrong with it, the server lives on.
    assert generate(server, (make_prompt(server, 3, ONE), Sampling(1.0, 2)))[0].token_ids
    return str(caught.value)


def spoiled(server: RunningServer, kind: str) -> Any:
    good = make_prompt(server, 3, ONE, 5)
    placeholder = server.info.image_placeholder_id
    return {
        "more placeholders than pictures": Prompt((*good.token_ids, placeholder), good.images),
        "more pictures than placeholders": Prompt(good.token_ids, (ONE, TWO)),
        "pictures without a placeholder": Prompt(good.token_ids[:3], good.images),
        "a placeholder without pictures": Prompt(good.token_ids, ()),
        "no tokens": Prompt((), ()),
        "an id outside the vocabulary": Prompt((*good.token_ids, 10**6), good.images),
        "too long": Prompt(good.token_ids * 200, good.images * 200),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "more placeholders than pictures",
        "more pictures than placeholders",
        "pictures without a placeholder",
        "a placeholder without pictures",
        "no tokens",
        "an id outside the vocabulary",
        "too long",
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_and_the_server_lives_on(server: RunningServer, kind: str) -> None:
    assert refusal(server, spoiled(server, kind))


def test_more_answers_than_the_server_decodes_together_are_refused(server: RunningServer) -> None:
    prompt = make_prompt(server, 3)
    with pytest.raises(InferenceError, match="HTTP 400"):
        generate(server, *((prompt, Sampling(1.0, 2, seed=seed)) for seed in range(65)))
