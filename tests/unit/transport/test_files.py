from __future__ import annotations

import time
from pathlib import Path

import pytest

from latepix.errors import TransportError
from latepix.transport.files import wait_for, write_bytes


def test_a_file_appears_in_full_and_alone(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a.bin", b"content")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.bin": b"content"}


def test_a_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"a longer content than the new one")
    write_bytes(tmp_path / "a.bin", b"new")
    assert (tmp_path / "a.bin").read_bytes() == b"new"


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_bytes(path, b"old")
    with path.open("rb") as reader:
        write_bytes(path, b"new")
        # Another file took the name; this one was not written into.
        assert reader.read() == b"old"


# Opening a link to /dev/full works and writing to it fails with ENOSPC, like a disk that is full.


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "batch.msgpack"
    (tmp_path / "batch.msgpack.tmp").symlink_to("/dev/full")
    with pytest.raises(
        TransportError, match=rf"^The disk is full: writing 1000 bytes to {path} failed \(\d+ bytes are free"
    ):
        write_bytes(path, b"x" * 1000)
    assert list(tmp_path.iterdir()) == []
    assert Path("/dev/full").is_char_device()


def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_bytes(path, b"old")
    (tmp_path / "summary.json.tmp").symlink_to("/dev/full")
    with pytest.raises(TransportError, match="The disk is full"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_folder_that_cannot_hold_the_file_is_named(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        TransportError, match=rf"Cannot write 3 bytes to .*{folder}/a.bin: (No such|Not a) (file|directory)"
    ):
        write_bytes(tmp_path / folder / "a.bin", b"abc")


def test_waiting_returns_what_was_found() -> None:
    answers = iter([None, None, 0])
    assert wait_for(lambda: next(answers), what="a number", timeout_s=10) == 0


def test_waiting_in_vain_names_what_was_waited_for() -> None:
    started = time.monotonic()
    with pytest.raises(
        TransportError, match=r"^Waited 0.05 s for the batch of step 3, in vain \(trainer.wait_timeout_s"
    ):
        wait_for(lambda: None, what="the batch of step 3", timeout_s=0.05)
    assert 0.05 <= time.monotonic() - started < 5
