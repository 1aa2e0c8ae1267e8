from __future__ import annotations

import io
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from latepix.errors import SchemaMismatch, TransportError
from latepix.inference.facts import Facts, TokenizerFacts
from latepix.transport.handshake import HandshakeFolder

FACTS = Facts(
    engine="trainer",
    versions={"torch": "2.9.0"},
    model="/models/a",
    dtype="float32",
    tokenizer=TokenizerFacts(vocab_sha256="ab" * 32, vocab_size=3, added_ids={"<|im_end|>": 2}),
    image_processor={"image_mean": [0.5, 0.5, 0.5], "size": {"longest_edge": 65536}},
)


def make_logprobs(*, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(4, 9)).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> HandshakeFolder:
    return HandshakeFolder(tmp_path)


def canaries(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "canary").iterdir())


def test_facts_arrive_as_they_were_sent(tmp_path: Path, folder: HandshakeFolder) -> None:
    folder.publish_facts(FACTS)
    assert HandshakeFolder(tmp_path).receive_facts(timeout_s=1) == FACTS
    assert [path.name for path in (tmp_path / "handshake").iterdir()] == ["trainer.json"]


def test_a_canary_arrives_as_it_was_sent(tmp_path: Path, folder: HandshakeFolder) -> None:
    folder.publish_canary(3, make_logprobs())
    got = HandshakeFolder(tmp_path).receive_canary(3, shape=(4, 9), timeout_s=1)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, make_logprobs())
    assert canaries(tmp_path) == ["step_000003.npy"]


def test_a_canary_of_another_dtype_is_sent_as_float32(folder: HandshakeFolder) -> None:
    folder.publish_canary(0, make_logprobs().astype(np.float64))
    assert folder.receive_canary(0, shape=(4, 9), timeout_s=1).dtype == np.float32


def test_every_version_has_a_canary_of_its_own(folder: HandshakeFolder) -> None:
    for version in (0, 1):
        folder.publish_canary(version, make_logprobs(seed=version))
    for version in (0, 1):
        np.testing.assert_array_equal(
            folder.receive_canary(version, shape=(4, 9), timeout_s=1), make_logprobs(seed=version)
        )


def test_both_are_waited_for(folder: HandshakeFolder) -> None:
    def later() -> None:
        time.sleep(0.1)
        folder.publish_facts(FACTS)
        time.sleep(0.1)
        folder.publish_canary(2, make_logprobs())

    thread = threading.Thread(target=later)
    started = time.monotonic()
    thread.start()
    try:
        assert folder.receive_facts(timeout_s=20) == FACTS
        folder.receive_canary(2, shape=(4, 9), timeout_s=20)
        assert time.monotonic() - started >= 0.2
    finally:
        thread.join()


def test_facts_that_do_not_come_are_named(tmp_path: Path, folder: HandshakeFolder) -> None:
    with pytest.raises(TransportError, match=rf"^Waited 0\.02 s for the trainer \({tmp_path}/handshake/trainer\.json"):
        folder.receive_facts(timeout_s=0.02)


def test_a_canary_that_does_not_come_is_named(tmp_path: Path, folder: HandshakeFolder) -> None:
    folder.publish_canary(3, make_logprobs())
    with pytest.raises(TransportError, match=rf"the trainer's canary \({tmp_path}/canary/step_000004\.npy\), in vain"):
        folder.receive_canary(4, shape=(4, 9), timeout_s=0.02)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"engine": 5}', b'{"versions": {}}', b"\xff\xfe"])
def test_facts_that_do_not_fit_are_refused(tmp_path: Path, folder: HandshakeFolder, data: bytes) -> None:
    (tmp_path / "handshake/trainer.json").write_bytes(data)
    with pytest.raises(SchemaMismatch, match=r"trainer\.json: .*Install the same latepix for trainer and orchestrator"):
        folder.receive_facts(timeout_s=1)


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def npz(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not an array",
        b"PK\x03\x04 damaged",
        npy(make_logprobs())[:-8],
        npy(make_logprobs())[:40],
        npz(make_logprobs()),
        pickle.dumps(make_logprobs()),
        npy(np.array([{"a": 1}], dtype=object)),
    ],
    ids=["empty", "text", "damaged zip", "short", "shorter", "archive", "pickle", "objects"],
)
def test_a_file_that_is_no_array_of_numbers_is_refused(tmp_path: Path, folder: HandshakeFolder, data: bytes) -> None:
    (tmp_path / "canary/step_000003.npy").write_bytes(data)
    with pytest.raises(SchemaMismatch, match=r"canary/step_000003\.npy is not an array of numbers: "):
        folder.receive_canary(3, shape=(4, 9), timeout_s=1)


class Bomb:
    """Leaves a trace where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_nothing_is_unpickled(tmp_path: Path, folder: HandshakeFolder) -> None:
    trace = tmp_path / "unpickled"
    data = npy(np.array([Bomb(trace)], dtype=object))
    np.load(io.BytesIO(data), allow_pickle=True)
    assert trace.exists()
    trace.unlink()
    (tmp_path / "canary/step_000003.npy").write_bytes(data)
    with pytest.raises(SchemaMismatch, match="pickle"):
        folder.receive_canary(3, shape=(4, 9), timeout_s=1)
    assert not trace.exists()


def test_old_canaries_are_pruned(tmp_path: Path, folder: HandshakeFolder) -> None:
    for version in range(5):
        folder.publish_canary(version, make_logprobs())
    (tmp_path / "canary/step_notes.npy").touch()
    folder.publish_facts(FACTS)
    folder.prune(keep_from=3)
    assert canaries(tmp_path) == ["step_000003.npy", "step_000004.npy", "step_notes.npy"]
    assert folder.receive_facts(timeout_s=1) == FACTS


def test_a_file_that_is_being_written_is_not_read(tmp_path: Path, folder: HandshakeFolder) -> None:
    (tmp_path / "canary/step_000003.npy.tmp").write_bytes(npy(make_logprobs()))
    (tmp_path / "handshake/trainer.json.tmp").write_bytes(b"{}")
    with pytest.raises(TransportError, match="in vain"):
        folder.receive_canary(3, shape=(4, 9), timeout_s=0.02)
    with pytest.raises(TransportError, match="in vain"):
        folder.receive_facts(timeout_s=0.02)


def test_a_canary_of_another_shape_is_refused(folder: HandshakeFolder) -> None:
    folder.publish_canary(0, make_logprobs())
    with pytest.raises(SchemaMismatch, match=r"has shape \(4, 9\), wanted \(6, 9\)\. Start trainer and orchestrator"):
        folder.receive_canary(0, shape=(6, 9), timeout_s=1)


def test_what_an_earlier_trainer_said_is_cleared(tmp_path: Path, folder: HandshakeFolder) -> None:
    folder.publish_facts(FACTS)
    folder.publish_canary(0, make_logprobs())
    HandshakeFolder(tmp_path).clear()
    assert canaries(tmp_path) == []
    with pytest.raises(TransportError, match="in vain"):
        folder.receive_facts(timeout_s=0.02)
