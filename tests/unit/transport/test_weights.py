from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from latepix.errors import ConfigError, TransportError
from latepix.transport.weights import WeightsFolder


def writer(content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(content)

    return write


def names(folder: WeightsFolder) -> list[str]:
    return sorted(entry.name for entry in folder.path.iterdir())


def test_weights_are_published_under_their_version(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path)
    path = folder.publish(3, writer(b"three"))
    assert path == tmp_path / "weights" / "step_000003" == folder.version_path(3)
    assert (path / "model.safetensors").read_bytes() == b"three"
    assert names(folder) == ["step_000003"]


def test_a_version_cannot_be_seen_before_it_is_complete(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path)
    seen = []

    def write(partial: Path) -> None:
        writer(b"three")(partial)
        seen.append((folder.newest(), folder.version_path(3).exists()))

    folder.publish(3, write)
    assert seen == [(None, False)]


def test_the_newest_version_is_found(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path)
    assert folder.newest() is None
    for version in (2, 10, 9):
        folder.publish(version, writer(b""))
    (folder.path / "step_000011.tmp").mkdir()
    (folder.path / "notes.txt").touch()
    assert WeightsFolder(tmp_path).newest() == 10


def test_old_versions_are_pruned(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path)
    for version in range(1, 6):
        folder.publish(version, writer(b""))
    folder.prune(keep_from=4)
    assert names(folder) == ["step_000004", "step_000005"]


def test_what_a_crash_left_is_written_over(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path)
    partial = folder.path / "step_000003.tmp"
    partial.mkdir()
    (partial / "half.safetensors").write_bytes(b"half")
    path = folder.publish(3, writer(b"three"))
    assert [file.name for file in path.iterdir()] == ["model.safetensors"]


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path)

    def write(partial: Path) -> None:
        (partial / "model.safetensors").symlink_to("/dev/full")
        (partial / "model.safetensors").write_bytes(b"x")

    with pytest.raises(TransportError, match=r"The disk is full: .*step_000003"):
        folder.publish(3, write)
    assert names(folder) == []
    assert Path("/dev/full").is_char_device()


def test_what_safetensors_says_of_the_disk_is_passed_on(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path)
    tensors = {"weight": np.zeros(1_000_000, dtype=np.float32)}
    # safetensors does not write through a link, so the limit on the size of a file stands in for a full disk.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))
    try:
        with pytest.raises(TransportError, match=r"^Cannot write .*step_000003: File too large\.$"):
            folder.publish(3, lambda partial: save_file(tensors, partial / "model.safetensors"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(folder) == []


def test_other_errors_are_passed_on_and_leave_nothing(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path)

    def write(partial: Path) -> None:
        writer(b"half")(partial)
        raise ValueError("no such tensor")

    with pytest.raises(ValueError, match="no such tensor"):
        folder.publish(3, write)
    assert names(folder) == []


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path)
    folder.check_unused()
    folder.publish(7, writer(b""))
    with pytest.raises(ConfigError, match=r"^output_dir: .* already holds the weights of another run \(version 7\)"):
        folder.check_unused()
