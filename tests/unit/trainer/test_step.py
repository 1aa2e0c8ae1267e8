from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from latepix.config.schema import ModelConfig, OptimConfig, TrainerConfig
from latepix.errors import NonFiniteLoss, PlaceholderMismatch, TrainerError
from latepix.orchestrator.batch import prepare_batch
from latepix.trace.refs import MMRefs
from latepix.trace.training import Batch, TrainingSample
from latepix.trainer.loss import LossInputs, LossOutputs, cross_entropy
from latepix.trainer.loss_choice import Loss
from latepix.trainer.step import TrainStep
from tests.tiny.pictures import make_image
from tests.tiny.policy import make_sample

PICTURE = make_image(seed=1)


def make_step(model: Path, loss: Loss = cross_entropy) -> TrainStep:
    return TrainStep(ModelConfig(path=model), TrainerConfig(optim=OptimConfig(lr=1e-3)), loss=loss, total_steps=10)


@pytest.fixture
def train_step(tiny_model: Path) -> Iterator[TrainStep]:
    train_step = make_step(tiny_model)
    yield train_step
    train_step.close()


def make_samples(train_step: TrainStep, count: int = 4) -> list[TrainingSample]:
    return [make_sample(train_step.info, 3, PICTURE, 2, seed=seed) for seed in range(count)]


def make_batch(samples: Sequence[TrainingSample], *, tokens: int = 1000, step: int = 0) -> Batch:
    alone = [msgspec.structs.replace(sample, group_id=number) for number, sample in enumerate(samples)]
    (batch,) = prepare_batch(alone, step=step, micro_batch_tokens=tokens)
    return batch


def weights_of(train_step: TrainStep) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in train_step.model.named_parameters()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_steps_lower_the_loss(train_step: TrainStep) -> None:
    batch = make_batch(make_samples(train_step))
    losses = [train_step.run(msgspec.structs.replace(batch, step=step)).values["loss/total"] for step in range(6)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1


def test_metrics_count_what_was_done(train_step: TrainStep) -> None:
    batch = make_batch(make_samples(train_step), tokens=20)
    values = train_step.run(batch).values
    assert len(batch.micro_batches) == 2
    assert values["train/tokens/sum"] == 4 * 9
    assert values["train/loss_tokens/sum"] == 4 * 3
    assert values["materialize/pictures/count"] == 1
    assert values["loss/total"] == pytest.approx(values["loss/cross_entropy/mean"], rel=1e-6)


def test_the_number_of_micro_batches_does_not_change_the_step(tiny_model: Path) -> None:
    results = []
    for tokens in (1000, 9):
        train_step = make_step(tiny_model)
        try:
            batch = make_batch(make_samples(train_step), tokens=tokens)
            results.append((len(batch.micro_batches), train_step.run(batch).values["optim/grad_norm"]))
        finally:
            train_step.close()
    assert [count for count, _ in results] == [1, 4]
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)


def test_a_batch_with_nothing_to_train_is_skipped_and_says_so(train_step: TrainStep) -> None:
    before = weights_of(train_step)
    for samples in ([], [make_sample(train_step.info, 4, PICTURE, answer=0)]):
        assert train_step.run(make_batch(samples)).values == {"train/skipped": 1.0}
    assert_same(weights_of(train_step), before)


def test_micro_batches_that_fill_up_a_rank_change_nothing(tiny_model: Path) -> None:
    samples = [msgspec.structs.replace(s, group_id=n) for n, s in enumerate(make_samples(make_step(tiny_model)))]
    ranks = prepare_batch(samples[:3], step=0, micro_batch_tokens=9, num_ranks=2)
    padding = ranks[1].micro_batches[-1]
    assert padding.trace_ids == ("padding",)
    results = []
    for extra in ((), (padding,)):
        train_step = make_step(tiny_model)
        try:
            batch = make_batch(samples, tokens=9)
            batch = msgspec.structs.replace(batch, micro_batches=(*batch.micro_batches, *extra))
            values = train_step.run(batch).values
            results.append((values["loss/total"], values["optim/grad_norm"], weights_of(train_step)))
        finally:
            train_step.close()
    assert results[0][:2] == results[1][:2]
    assert_same(results[0][2], results[1][2])


def nan_in_the_second(calls: list[int]) -> Any:
    def loss(inputs: LossInputs) -> LossOutputs:
        calls.append(len(inputs.advantages))
        outputs = cross_entropy(inputs)
        return msgspec.structs.replace(outputs, loss=outputs.loss * float("nan")) if len(calls) == 2 else outputs

    return loss


def test_a_loss_that_is_not_finite_refuses_the_step_and_leaves_nothing_behind(tiny_model: Path) -> None:
    train_step, clean = make_step(tiny_model, nan_in_the_second([])), make_step(tiny_model)
    try:
        before = weights_of(train_step)
        with pytest.raises(NonFiniteLoss, match=r"Step 3: the loss is nan in a micro batch of traces trace-\d"):
            train_step.run(make_batch(make_samples(train_step), tokens=9, step=3))
        assert_same(weights_of(train_step), before)
        # The next step is that of a model to which nothing has happened.
        again = make_batch(make_samples(train_step)[:2])
        assert train_step.run(again).values["optim/grad_norm"] == clean.run(again).values["optim/grad_norm"]
        assert_same(weights_of(train_step), weights_of(clean))
    finally:
        train_step.close()
        clean.close()


def test_a_gradient_that_is_not_finite_refuses_the_step_and_leaves_nothing_behind(tiny_model: Path) -> None:
    poisoned = [True]

    def loss(inputs: LossInputs) -> LossOutputs:
        outputs = cross_entropy(inputs)
        if not poisoned.pop():
            return outputs
        # Its value is 0 and its derivative at 0 is infinite.
        zero = (inputs.trainer_logprobs - inputs.trainer_logprobs.detach()).sum().abs().sqrt()
        return msgspec.structs.replace(outputs, loss=outputs.loss + zero)

    train_step = make_step(tiny_model, loss)
    try:
        before = weights_of(train_step)
        with pytest.raises(NonFiniteLoss, match="the gradient's norm is nan"):
            train_step.run(make_batch(make_samples(train_step)))
        assert_same(weights_of(train_step), before)
        poisoned.append(False)
        assert np.isfinite(train_step.run(make_batch(make_samples(train_step))).values["optim/grad_norm"])
    finally:
        train_step.close()


def test_a_picture_that_does_not_fit_its_slot_refuses_the_step(train_step: TrainStep) -> None:
    before = weights_of(train_step)
    good = make_sample(train_step.info, 3, PICTURE, 2)
    wrong = msgspec.structs.replace(good, mm_refs=MMRefs.from_slots([(make_image(width=64, seed=2), 3, 1)]))
    with pytest.raises(PlaceholderMismatch, match=r"needs 2 tokens, the sample has 1"):
        train_step.run(make_batch([good, wrong], tokens=9))
    assert_same(weights_of(train_step), before)


def mismatched(inputs: LossInputs) -> LossOutputs:
    outputs = cross_entropy(inputs)
    return msgspec.structs.replace(outputs, sums={"loss/mismatch_kl/mean": 0.5 * len(inputs.trainer_logprobs)})


def test_a_mismatch_above_the_limit_refuses_the_step(tiny_model: Path) -> None:
    train_step = make_step(tiny_model, mismatched)
    try:
        batch = make_batch(make_samples(train_step))
        before = weights_of(train_step)
        for limit in (0.5, 0.1):
            with pytest.raises(
                TrainerError, match=r"mean mismatch KL is 0\.5, wanted below .* \(trainer\.max_mismatch_kl\)"
            ):
                train_step.run(batch, max_mismatch_kl=limit)
        assert_same(weights_of(train_step), before)
        assert train_step.run(batch, max_mismatch_kl=0.51).values["loss/mismatch_kl/mean"] == pytest.approx(0.5)
        train_step.run(batch)
    finally:
        train_step.close()
