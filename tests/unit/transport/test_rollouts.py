from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from latepix.errors import SchemaMismatch, TransportError
from latepix.orchestrator.batch import prepare_batch
from latepix.trace.training import Batch, encode_batch
from latepix.transport.rollouts import BatchFolder
from tests.tiny.pictures import make_image
from tests.tiny.traces import make_sample


def make_batch(*, step: int = 3) -> Batch:
    samples = [make_sample(images=(make_image(seed=seed),), group_id=seed) for seed in range(3)]
    return prepare_batch(samples, step=step, micro_batch_tokens=12)[0]


def test_what_was_sent_is_received(tmp_path: Path) -> None:
    batch = make_batch()
    num_bytes = BatchFolder(tmp_path).send(batch)
    received = BatchFolder(tmp_path).receive(3, timeout_s=1)
    assert encode_batch(received) == encode_batch(batch)
    assert num_bytes == len(encode_batch(batch))


def test_a_batch_stays_until_it_is_done(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    folder.send(make_batch())
    for _ in range(2):
        assert folder.receive(3, timeout_s=1).num_samples == 3
    folder.done(3)
    assert list(folder.path.iterdir()) == []
    folder.done(3)


def test_the_trainer_waits_for_its_batch(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    sender = threading.Timer(0.05, folder.send, [make_batch()])
    sender.start()
    try:
        assert folder.receive(3, timeout_s=10).step == 3
    finally:
        sender.join()


def test_a_batch_that_does_not_come_is_named(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    folder.send(make_batch(step=2))
    with pytest.raises(TransportError, match=r"Waited 0.02 s for the batch of step 3 \(.*step_000003.msgpack\)"):
        folder.receive(3, timeout_s=0.02)


def test_a_damaged_batch_is_named(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    folder.send(make_batch())
    path = folder.path / "step_000003.msgpack"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(SchemaMismatch, match=r"step_000003.msgpack \(\d+ bytes\) is not a batch"):
        folder.receive(3, timeout_s=1)


def test_a_batch_of_another_step_is_refused(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    folder.send(make_batch())
    (folder.path / "step_000003.msgpack").rename(folder.path / "step_000004.msgpack")
    with pytest.raises(TransportError, match=r"step_000004.msgpack holds the batch of step 3"):
        folder.receive(4, timeout_s=1)


def test_a_batch_of_another_wire_version_is_refused(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    folder.send(msgspec.structs.replace(make_batch(), wire_version=99))
    with pytest.raises(SchemaMismatch, match=r"wire version 99, this trainer reads 1"):
        folder.receive(3, timeout_s=1)


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    (folder.path / "step_000003.msgpack.tmp").symlink_to("/dev/full")
    with pytest.raises(TransportError, match="The disk is full"):
        folder.send(make_batch())
    assert list(folder.path.iterdir()) == []
