from __future__ import annotations

import msgspec
import pytest

from latepix.errors import StaleWeights
from latepix.orchestrator.batch import prepare_batch
from latepix.trace.training import Batch
from latepix.trainer.loop import _check_versions
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
