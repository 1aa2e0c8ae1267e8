from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from latepix.config.schema import ModelConfig, RunConfig, TrainerConfig
from latepix.errors import NonFiniteLoss, StaleWeights, TransportError
from latepix.orchestrator.batch import prepare_batch
from latepix.trace.training import Batch, decode_batch
from latepix.trainer.loop import _check_versions, _is_on_policy, _train, run_trainer
from latepix.trainer.loss import LossInputs, LossOutputs
from latepix.trainer.step import TrainStep
from latepix.transport.handshake import HandshakeFolder
from latepix.transport.rollouts import BatchFolder
from tests.tiny.policy import make_sample as make_policy_sample
from tests.tiny.traces import make_sample


def make_batch(*versions: int, step: int) -> Batch:
    samples = [msgspec.structs.replace(make_sample(), policy_version=version) for version in versions]
    return prepare_batch(samples, step=step, micro_batch_tokens=1000)[0]


@pytest.mark.parametrize(("versions", "off_policy"), [((4,), 0), ((3, 4), 1), ((-1,), 0), ((), 0)])
def test_weights_within_the_bound_are_taken(versions: tuple[int, ...], off_policy: int) -> None:
    _check_versions(make_batch(*versions, step=4), off_policy)


@pytest.mark.parametrize(("version", "off_policy"), [(3, 0), (2, 1), (240, 1)])
def test_other_weights_stop_the_step(version: int, off_policy: int) -> None:
    with pytest.raises(StaleWeights, match=rf"^Step 4, trace .*: sampled by policy version {version}, wanted "):
        _check_versions(make_batch(4, version, step=4), off_policy)


def test_what_an_earlier_trainer_said_is_gone_once_this_one_speaks(tiny_model: Path, tmp_path: Path) -> None:
    HandshakeFolder(tmp_path).publish_canary(7, np.zeros((1, 1)))
    settings = {"output_dir": tmp_path, "model": {"path": tiny_model}, "trainer": {"wait_timeout_s": 0.05}}
    with pytest.raises(TransportError, match="in vain"):
        run_trainer(RunConfig.model_validate(settings))
    assert [path.name for path in (tmp_path / "canary").iterdir()] == ["step_000000.npy"]
    assert HandshakeFolder(tmp_path).receive_facts(timeout_s=1).engine == "trainer"


def test_a_step_that_is_refused_names_the_file_of_its_batch(tiny_model: Path, tmp_path: Path) -> None:
    config = TrainerConfig()
    step = TrainStep(ModelConfig(path=tiny_model), config, loss=not_a_number, total_steps=1)
    batches = BatchFolder(tmp_path)
    try:
        (batch,) = prepare_batch([make_policy_sample(step.info, 3, answer=2)], step=7, micro_batch_tokens=1000)
        batches.send(batch)
        with pytest.raises(NonFiniteLoss, match=r"Step 7: the loss is nan .* The batch is in .*step_000007\.msgpack"):
            _train(step, batch, None, batches)
        kept = decode_batch(batches.step_path(7).read_bytes())
        assert kept.micro_batches[0].token_ids.tolist() == batch.micro_batches[0].token_ids.tolist()
    finally:
        step.close()


def not_a_number(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=inputs.trainer_logprobs.sum() * float("nan"), sums={}, maxima={})


def test_only_samples_of_the_newest_weights_are_on_policy() -> None:
    assert _is_on_policy(make_batch(3, 3, step=3))
    assert not _is_on_policy(make_batch(3, 2, step=3))
