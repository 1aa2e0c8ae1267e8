"""What the trainer tells whoever talks to the server: how it is set up, and its canary of every version.

`handshake/trainer.json` are the trainer's `Facts`; `canary/step_000003.npy` are the log-probabilities [K, V] of the
canary prompts at policy version 3. Both appear whole or not at all; the canary of a version comes before its weights.
"""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import numpy as np

from latepix.errors import SchemaMismatch
from latepix.inference.facts import Facts
from latepix.transport.files import wait_for, write_bytes


class HandshakeFolder:
    """Both ends of it."""

    def __init__(self, run_dir: Path) -> None:
        self._facts = run_dir / "handshake" / "trainer.json"
        self._canary = run_dir / "canary"
        for folder in (self._facts.parent, self._canary):
            folder.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Remove what an earlier trainer said here: whoever comes first must not take it for this one's."""
        self._facts.unlink(missing_ok=True)
        self.prune(keep_from=1 << 62)

    def publish_facts(self, facts: Facts) -> None:
        """Show how the trainer is set up.

        Raises:
            TransportError: the disk refused.
        """
        write_bytes(self._facts, msgspec.json.format(msgspec.json.encode(facts)))

    def receive_facts(self, *, timeout_s: float) -> Facts:
        """Wait for the trainer's facts.

        Raises:
            TransportError: they did not come in time.
            SchemaMismatch: they are of another version of latepix.
        """
        data = wait_for(lambda: _read(self._facts), what=f"the trainer ({self._facts})", timeout_s=timeout_s)
        try:
            return msgspec.json.decode(data, type=Facts)
        except msgspec.MsgspecError as error:
            raise SchemaMismatch(
                f"{self._facts}: {error}. Install the same latepix for trainer and orchestrator."
            ) from error

    def publish_canary(self, policy_version: int, logprobs_KV: np.ndarray) -> None:
        """Show the trainer's [K, V] float32 log-probabilities at a version.

        Raises:
            TransportError: the disk refused.
        """
        buffer = io.BytesIO()
        np.save(buffer, logprobs_KV.astype(np.float32), allow_pickle=False)
        write_bytes(self._canary_path(policy_version), buffer.getvalue())

    def receive_canary(self, policy_version: int, *, shape: tuple[int, int], timeout_s: float) -> np.ndarray:
        """Wait for the [K, V] float32 log-probabilities of a version.

        Args:
            policy_version: whose.
            shape: (K, V) that it must have.
            timeout_s: seconds until it is given up.
        Raises:
            TransportError: they did not come in time.
            SchemaMismatch: the file is damaged, or of another shape.
        """
        path = self._canary_path(policy_version)
        data = wait_for(lambda: _read(path), what=f"the trainer's canary ({path})", timeout_s=timeout_s)
        try:
            # Not `np.load`, which takes archives, too.
            logprobs_KV = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        except ValueError as error:
            raise SchemaMismatch(f"{path} is not an array of numbers: {error}.") from error
        if logprobs_KV.shape != shape:
            raise SchemaMismatch(
                f"{path} has shape {logprobs_KV.shape}, wanted {shape}. Start trainer and orchestrator from the same "
                "config, with the same latepix."
            )
        return logprobs_KV

    def prune(self, *, keep_from: int) -> None:
        """Remove the canaries of versions older than `keep_from`."""
        for path in self._canary.glob("step_*.npy"):
            number = path.stem.removeprefix("step_")
            if number.isdigit() and int(number) < keep_from:
                path.unlink(missing_ok=True)

    def _canary_path(self, policy_version: int) -> Path:
        return self._canary / f"step_{policy_version:06d}.npy"


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
