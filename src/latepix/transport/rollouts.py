"""Batches from the orchestrator to the trainer, through a folder both can see.

`batches/step_000003.msgpack` appears at once and in full; the trainer removes it when the step's weights are out, so
what lies there is what has not been trained.
"""

from __future__ import annotations

from pathlib import Path

from latepix.errors import ConfigError, TransportError
from latepix.trace.training import Batch, decode_batch, encode_batch
from latepix.transport.files import wait_for, write_bytes


class BatchFolder:
    """Both ends of the folder."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "batches"
        self.path.mkdir(parents=True, exist_ok=True)

    def check_unused(self) -> None:
        """Refuse a folder in which batches of another run wait to be trained.

        Raises:
            ConfigError: says how many.
        """
        left = sorted(self.path.glob("step_*.msgpack"))
        if left:
            raise ConfigError(
                f"output_dir: {self.path} holds {len(left)} batches of another run ({left[0].name}, ...). Choose "
                "another output_dir, or remove the folder."
            )

    def send(self, batch: Batch) -> int:
        """Write a batch; returns its size in bytes.

        Raises:
            TransportError: the disk refused.
        """
        data = encode_batch(batch)
        write_bytes(self.step_path(batch.step), data)
        return len(data)

    def receive(self, step: int, *, timeout_s: float) -> Batch:
        """Wait for a step's batch and read it; it stays until `done`.

        Raises:
            TransportError: it did not come in time.
            SchemaMismatch: it is damaged or of another wire version.
        """
        path = self.step_path(step)
        wait_for(
            lambda: path if path.exists() else None, what=f"the batch of step {step} ({path})", timeout_s=timeout_s
        )
        batch = decode_batch(path.read_bytes(), where=str(path))
        if batch.step != step:
            raise TransportError(f"{path} holds the batch of step {batch.step}.")
        return batch

    def done(self, step: int) -> None:
        """Remove a step's batch."""
        self.step_path(step).unlink(missing_ok=True)

    def step_path(self, step: int) -> Path:
        """Return the file of a step's batch."""
        return self.path / f"step_{step:06d}.msgpack"
