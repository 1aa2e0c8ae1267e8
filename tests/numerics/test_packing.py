"""A packed row = padded rows = one sample after the other = Hugging Face's plain forward.

Tolerances: logprobs 2e-5 absolute (these policies' logprobs go down to -34, where float32 is 4e-6 apart) and gradients
1e-5 of the parameter's largest entry. Only the order of additions differs. A leak between samples is of the order of 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from latepix.errors import ConfigError
from latepix.families.base import ForwardPolicy
from latepix.families.tiny import TINY_FAMILIES
from latepix.trace.training import TrainingSample, pack_samples
from latepix.trainer.forward import choose_layout, forward
from latepix.trainer.loss import LossInputs, policy_loss, trust_region
from latepix.trainer.materialize import materialize_mm_refs
from tests.tiny.policy import Policy, assert_same_gradients, draw, gradients, make_sample, score

LOGPROB_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 1e-5
SMALL, WIDE, TALL, LARGE = (
    draw(32, 32, seed=1),
    draw(96, 32, seed=2),
    draw(32, 128, seed=3),
    draw(96, 64, seed=4),
)


@pytest.fixture(scope="module", params=TINY_FAMILIES)
def policy(request: pytest.FixtureRequest, family_policy: Callable[[str], Policy]) -> Policy:
    """Return the sharpened model of each family in turn."""
    return family_policy(request.param)


def mixed_samples(policy: Policy) -> list[TrainingSample]:
    info = policy.info
    return [
        make_sample(info, 6, answer=3, seed=1),
        make_sample(info, 4, WIDE, 3, answer=5, seed=2, temperature=0.7),
        make_sample(info, SMALL, 2, LARGE, 1, TALL, 4, answer=2, seed=3),
        make_sample(info, 3, SMALL, SMALL, 2, answer=4, seed=4, temperature=1.3),
        make_sample(info, 2, LARGE, 9, WIDE, 1, WIDE, 2, answer=6, seed=5),
        make_sample(info, 1, answer=1, seed=6),
    ]


def plain_logprobs(policy: Policy, sample: TrainingSample) -> torch.Tensor:
    """Compute the trained tokens' logprobs with Hugging Face's own forward: pixels in, one entry per slot."""
    processed = [policy.adapter.process_image(policy.processor, image.open()) for image in sample.mm_refs.images]
    slots = [processed[ref.image] for ref in sample.mm_refs.refs]
    pictures: dict[str, torch.Tensor] = {}
    if slots:
        pictures = {
            "pixel_values": torch.cat([slot.pixel_values for slot in slots]),
            "image_grid_thw": torch.tensor([slot.grid_thw for slot in slots]),
        }
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    model: Any = policy.model
    types: dict[str, torch.Tensor] = {}
    if policy.adapter.forward_policy.takes_mm_token_type_ids:
        types = {"mm_token_type_ids": torch.from_numpy(sample.mm_token_type_ids.astype(np.int64))[None]}
    logits = model(input_ids=ids[None], **types, **pictures).logits[0]
    logits = logits.index_fill(1, torch.tensor(policy.info.banned_ids), -math.inf) / sample.temperature
    trained = torch.from_numpy(np.flatnonzero(sample.loss_mask))
    return torch.log_softmax(logits[trained - 1], dim=-1).gather(1, ids[trained, None])[:, 0]


def test_the_policy_is_peaked_and_looks_at_its_pictures(policy: Policy) -> None:
    entropies = score(policy, mixed_samples(policy)).entropies
    assert entropies.mean() < 0.6 * math.log(policy.info.vocab_size)
    one, other = (score(policy, [make_sample(policy.info, 3, draw(64, 64, seed=s), 4)]) for s in (8, 9))
    assert (one.trainer_logprobs - other.trainer_logprobs).abs().min() > 0.01


def test_samples_together_equal_samples_one_by_one(policy: Policy) -> None:
    samples = mixed_samples(policy)
    alone = [score(policy, [sample], layout="padded") for sample in samples]
    for layout in policy.adapter.forward_policy.layouts:
        together = score(policy, samples, layout=layout)
        for name in ("trainer_logprobs", "entropies"):
            wanted = torch.cat([getattr(one, name) for one in alone])
            assert (getattr(together, name) - wanted).abs().max() < LOGPROB_TOLERANCE


def test_every_layout_gives_the_gradients_of_one_by_one(policy: Policy) -> None:
    samples = mixed_samples(policy)
    total: dict[str, torch.Tensor] = {}
    for sample in samples:
        for name, gradient in gradients(
            policy, score(policy, [sample], layout="padded").trainer_logprobs.sum()
        ).items():
            total[name] = total.get(name, torch.zeros(())) + gradient
    for layout in policy.adapter.forward_policy.layouts:
        together = gradients(policy, score(policy, samples, layout=layout).trainer_logprobs.sum())
        assert_same_gradients(together, total, rtol=GRADIENT_TOLERANCE)


# Without sample 3: get_rope_index takes pictures that touch for one; test_positions.py works them by hand.
@pytest.mark.parametrize("index", [0, 1, 2, 4, 5])
def test_a_sample_equals_hugging_faces_plain_forward(policy: Policy, index: int) -> None:
    sample = mixed_samples(policy)[index]
    ours, wanted = score(policy, [sample]).trainer_logprobs, plain_logprobs(policy, sample)
    assert (ours - wanted).abs().max() < LOGPROB_TOLERANCE


def test_a_neighbours_pixels_change_nothing(policy: Policy) -> None:
    for layout in policy.adapter.forward_policy.layouts:
        check_neighbours(policy, layout)


def check_neighbours(policy: Policy, layout: str) -> None:
    first, last = make_sample(policy.info, 3, WIDE, 2, seed=1), make_sample(policy.info, 2, SMALL, 4, seed=2)
    outputs = [
        score(policy, [first, make_sample(policy.info, 2, picture, 3, seed=3), last], layout=layout).trainer_logprobs
        for picture in (draw(64, 64, seed=21), draw(64, 64, seed=22))
    ]
    # Masked attention weights are exactly 0, so this holds bit for bit; but an expert's matrix product rounds a token
    # differently in other company.
    has_experts = any("experts" in name for name, _ in policy.model.named_parameters())
    tolerance = LOGPROB_TOLERANCE if has_experts else 0.0
    for own in (slice(3), slice(6, None)):
        assert (outputs[0][own] - outputs[1][own]).abs().max() <= tolerance
    assert (outputs[0][3:6] - outputs[1][3:6]).abs().min() > 1e-3


def test_a_shared_picture_gets_the_sum_of_its_slots_gradients(policy: Policy) -> None:
    # Encoded once and shown five times here; encoded five times by the plain forward.
    samples = [
        make_sample(policy.info, 2, LARGE, 3, LARGE, 2, answer=4, seed=1),
        make_sample(policy.info, 5, LARGE, 1, WIDE, 1, LARGE, 2, answer=3, seed=2),
        make_sample(policy.info, 1, WIDE, 1, LARGE, 1, answer=2, seed=3),
    ]
    assert len(pack_samples(samples).mm_refs.images) == 2
    ours = gradients(policy, score(policy, samples).trainer_logprobs.sum())
    plain = gradients(policy, torch.cat([plain_logprobs(policy, sample) for sample in samples]).sum())
    assert_same_gradients(ours, plain, rtol=GRADIENT_TOLERANCE)
    assert any("visual" in name or "vision_tower" in name for name in ours)


def loss_gradients(policy: Policy, batches: Sequence[Sequence[TrainingSample]]) -> dict[str, torch.Tensor]:
    """Return the gradient of the policy loss over micro batches, under the whole batch's one denominator."""
    num_loss_tokens = int(sum(sample.loss_mask.sum() for samples in batches for sample in samples))
    losses = []
    for samples in batches:
        outputs = score(policy, samples)
        micro_batch = pack_samples(samples)
        trained = np.flatnonzero(micro_batch.loss_mask)
        inputs = LossInputs(
            trainer_logprobs=outputs.trainer_logprobs,
            # Close to the trainer's, as they are in a run: ratios of e^8 would drown everything else.
            inference_logprobs=outputs.trainer_logprobs.detach() - 0.1,
            advantages=torch.from_numpy(micro_batch.advantages[trained]),
            entropies=outputs.entropies,
            num_loss_tokens=num_loss_tokens,
        )
        terms = trust_region(inputs, max_prob_increase=0.2, max_prob_decrease=0.2, log_ratio_penalty=0.1)
        losses.append(policy_loss(inputs, terms, entropy_bonus=0.05).loss)
    return gradients(policy, torch.stack(losses).sum())


@pytest.mark.parametrize("sizes", [(3, 3), (1, 1, 1, 1, 1, 1), (5, 1)])
def test_several_micro_batches_equal_one(policy: Policy, sizes: tuple[int, ...]) -> None:
    samples = mixed_samples(policy)
    cuts = np.cumsum((0, *sizes))
    split = [samples[start:end] for start, end in itertools.pairwise(cuts)]
    assert_same_gradients(loss_gradients(policy, [samples]), loss_gradients(policy, split), rtol=GRADIENT_TOLERANCE)


def test_the_cheaper_layout_is_chosen(policy: Policy) -> None:
    both = ForwardPolicy(positions="mrope", layouts=("packed", "padded"), takes_mm_token_type_ids=True)
    # 64 equal short rows: padding wastes nothing, a packed row would attend across 2,048 tokens.
    assert choose_layout([32] * 64, both, hidden_size=96, wanted="auto") == "padded"
    assert choose_layout([400, *[8] * 20], both, hidden_size=96, wanted="auto") == "packed"


def test_a_layout_that_would_leak_is_refused(policy: Policy) -> None:
    padded_only = ForwardPolicy(positions="mrope", layouts=("padded",), takes_mm_token_type_ids=True)
    assert choose_layout([400, *[8] * 20], padded_only, hidden_size=96, wanted="auto") == "padded"
    sample = make_sample(policy.info, 3)
    micro_batch = pack_samples([sample])
    with pytest.raises(ConfigError, match=r"trainer\.layout: 'packed' is not safe"):
        forward(
            policy.model,
            micro_batch,
            materialize_mm_refs(micro_batch.mm_refs, policy.adapter, policy.processor),
            adapter=policy.adapter,
            info=policy.info,
            mm_forward_policy=padded_only,
            layout="packed",
        )
