"""Activation checkpointing, autocast and what the forward refuses, for every family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from latepix.config.losses import LossConfig
from latepix.config.schema import ModelConfig, OptimConfig, TrainerConfig
from latepix.errors import ConfigError, TrainerError
from latepix.families.tiny import TINY_FAMILIES
from latepix.orchestrator.batch import prepare_batch
from latepix.trace.training import TrainingSample, pack_samples
from latepix.trainer.loading import check_attention, checkpoint_activations
from latepix.trainer.loss_choice import loss_of
from latepix.trainer.step import TrainStep
from tests.tiny.policy import Policy, assert_same_gradients, draw, gradients, load_policy, make_sample, score


@pytest.fixture(scope="module", params=TINY_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def samples_of(policy: Policy) -> list[TrainingSample]:
    return [
        make_sample(policy.info, 3, draw(64, 32, seed=1), 2, answer=4, seed=1),
        make_sample(policy.info, 5, answer=3, seed=2, advantage=-0.5),
    ]


def test_checkpointed_layers_give_the_same_gradients(family: str, sharp_family: Callable[[str], Path]) -> None:
    policy = load_policy(sharp_family(family))
    wanted = gradients(policy, score(policy, samples_of(policy)).trainer_logprobs.sum())
    checkpoint_activations(policy.model)
    forwards = 0

    def count(*unused: object) -> None:
        nonlocal forwards
        forwards += 1

    layers: list[Any] = [module for module in policy.model.modules() if type(module).__name__.endswith("DecoderLayer")]
    layers[0].mlp.register_forward_pre_hook(count)
    found = gradients(policy, score(policy, samples_of(policy)).trainer_logprobs.sum())
    assert forwards == 2, "the layer was not computed again"
    assert not any(module.training for module in policy.model.modules() if isinstance(module, torch.nn.Dropout))
    assert_same_gradients(found, wanted, rtol=1e-6)


def test_autocast_is_close_and_leaves_float32_weights_and_gradients(
    family: str, family_policy: Callable[[str], Policy]
) -> None:
    policy = family_policy(family)
    samples = samples_of(policy)
    outputs = score(policy, samples, autocast=True)
    assert outputs.trainer_logprobs.dtype == torch.float32
    found = gradients(policy, outputs.trainer_logprobs.sum())
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert all(bool(torch.isfinite(gradient).all()) for gradient in found.values())
    wanted = score(policy, samples).trainer_logprobs
    difference = (outputs.trainer_logprobs - wanted).abs().mean()
    # Bfloat16 has 8 bits: visible, and small beside the spread of the logprobs (10 nats and more).
    assert 1e-4 < difference < 0.15 * wanted.abs().mean()


def test_autocast_gradients_do_not_depend_on_the_budget_of_logits(policy: Policy) -> None:
    samples = samples_of(policy)
    one, other = (
        gradients(policy, score(policy, samples, autocast=True, logits_bytes=size).trainer_logprobs.sum())
        for size in (1 << 40, 3000)
    )
    # One rounds the gradient of each logit to bfloat16 in another order than the other: a few of its 256ths.
    assert_same_gradients(one, other, rtol=0.03)


def test_a_sample_longer_than_the_models_positions_is_refused_by_name(policy: Policy) -> None:
    short = Policy(
        path=policy.path,
        info=msgspec.structs.replace(policy.info, max_position_embeddings=9),
        adapter=policy.adapter,
        processor=policy.processor,
        model=policy.model,
    )
    score(short, [make_sample(policy.info, 6, answer=3)])
    with pytest.raises(TrainerError, match=r"Trace trace-4: the sample has 10 tokens, the model has positions for 9"):
        score(short, [make_sample(policy.info, 6, answer=3), make_sample(policy.info, 6, answer=4, seed=4)])


@pytest.fixture
def make_step(tmp_path: Path) -> Iterator[Callable[..., TrainStep]]:
    made: list[TrainStep] = []

    def make(path: Path, loss: LossConfig | None = None, **settings: object) -> TrainStep:
        loss = loss or LossConfig()
        config = TrainerConfig.model_validate({"loss": loss, "optim": OptimConfig(lr=1e-3), **settings})
        made.append(
            TrainStep(
                ModelConfig(path=path), config, loss=loss_of(loss), total_steps=5, with_reference=loss.kl_weight > 0
            )
        )
        return made[-1]

    yield make
    for step in made:
        step.close()


def test_a_recurrent_family_refuses_packed_rows_before_anything_is_trained(
    sharp_family: Callable[[str], Path], make_step: Callable[..., TrainStep]
) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.layout: 'packed' is not safe .* \(it allows padded\)"):
        make_step(sharp_family("qwen3_5"), layout="packed")
    make_step(sharp_family("qwen3_5"), layout="padded")


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_a_kernel_for_gpus_is_refused_on_a_cpu(
    attention: str, sharp_model: Path, make_step: Callable[..., TrainStep]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ConfigError, match=rf"trainer\.attention: '{attention}' needs a GPU"):
        make_step(sharp_model, attention=attention)


def test_a_kernel_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package flash_attn, which is not installed"):
        check_attention("flash_attention_2", "cuda")
    check_attention("flex_attention", "cuda")


@pytest.mark.parametrize("kind", ["trust_region", "grpo_clip", "cispo", "gspo"])
def test_every_loss_takes_steps_and_the_reference_stays(
    kind: str, sharp_model: Path, make_step: Callable[..., TrainStep], policy: Policy
) -> None:
    step = make_step(sharp_model, LossConfig(type=kind, kl_weight=0.1))
    samples = samples_of(policy)
    trained = [
        msgspec.structs.replace(sample, inference_logprobs=step_logprobs(step, sample), group_id=number)
        for number, sample in enumerate(samples)
    ]
    values = []
    for number in range(2):
        (batch,) = prepare_batch(trained, step=number, micro_batch_tokens=1000)
        values.append(step.run(batch).values)
    assert values[0]["loss/reference_kl/mean"] == 0.0
    assert values[1]["loss/reference_kl/mean"] > 1e-6
    assert values[1]["loss/importance_ratio/max"] != 1.0


def step_logprobs(step: TrainStep, sample: TrainingSample) -> object:
    logprobs = sample.inference_logprobs.copy()
    logprobs[sample.loss_mask] = step.measure(pack_samples([sample])).trainer_logprobs.numpy()
    return logprobs
