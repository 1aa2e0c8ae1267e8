"""Weights from the trainer to the server: `weights/step_000003/` is policy version 3, a safetensors folder.

The folder is written aside and renamed, so a version that can be seen is complete. Version 0 is the model the run
started from and is not written.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from latepix.errors import ConfigError
from latepix.transport.files import write_folder

_PREFIX = "step_"


class WeightsFolder:
    """Both ends of the folder."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "weights"
        self.path.mkdir(parents=True, exist_ok=True)

    def version_path(self, policy_version: int) -> Path:
        """Return where a version lies."""
        return self.path / f"{_PREFIX}{policy_version:06d}"

    def publish(self, policy_version: int, write: Callable[[Path], None]) -> Path:
        """Let `write` fill a folder aside, then show it as `policy_version`.

        Raises:
            TransportError: the disk refused.
        """
        return write_folder(self.version_path(policy_version), write)

    def newest(self) -> int | None:
        """Return the newest version, None if there is none yet."""
        versions = [
            int(entry.name.removeprefix(_PREFIX))
            for entry in self.path.iterdir()
            if entry.name.removeprefix(_PREFIX).isdigit()
        ]
        return max(versions, default=None)

    def check_unused(self) -> None:
        """Refuse a folder that already holds versions: they would be taken for those of the run that begins.

        Raises:
            ConfigError: names the newest version.
        """
        newest = self.newest()
        if newest is not None:
            raise ConfigError(
                f"output_dir: {self.path} already holds the weights of another run (version {newest}). Choose another "
                "folder, or remove it."
            )

    def prune(self, *, keep_from: int) -> None:
        """Remove versions older than `keep_from`."""
        for entry in self.path.iterdir():
            number = entry.name.removeprefix(_PREFIX)
            if number.isdigit() and int(number) < keep_from:
                shutil.rmtree(entry, ignore_errors=True)
