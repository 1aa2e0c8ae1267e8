"""The errors latepix raises. Every message says what, where, got, wanted and what to do.

    LatepixError
    |-- ConfigError(ValueError)             a setting, a path or a model folder the user gave is wrong
    |-- ImageError(ValueError)              ingress refused a picture; `reason` is a stable code
    |-- PlaceholderMismatch(ValueError)     pictures, ranges and placeholder tokens do not fit each other
    |-- RolloutError(RuntimeError)          one rollout failed; it is recorded and the run goes on
    |   |-- EnvError                        the environment raised
    |   |-- RolloutTimeout                  it did not come to its end in time
    |   `-- InferenceError                  the server refused, failed or answered something that does not fit
    |-- TransportError(RuntimeError)        a batch or weights could not be written or read
    |   |-- StaleWeights                    weights that were asked for are not the ones that are served
    |   |-- HandshakeFailed                 server and trainer are set up differently
    |   `-- SchemaMismatch                  the other side speaks another version of the wire format
    |-- TrainerError(RuntimeError)
    |   |-- NonFiniteLoss                   NaN or infinity in the loss or the gradient; the step is refused
    |   `-- CheckpointError
    `-- ProcessFailed(RuntimeError)         a child process of `latepix rl` died or never came up

All of them survive pickling, so they can cross process borders.
"""

from __future__ import annotations


class LatepixError(Exception):
    """Base of every error raised on purpose by latepix."""


class ConfigError(LatepixError, ValueError):
    """A setting, a path or a model folder that the user gave is wrong."""


class ImageError(LatepixError, ValueError):
    """A picture that ingress refused.

    Attributes:
        reason: a stable code such as `not_an_image` or `too_many_pixels` (see `trace/ingress.py`).
    """

    def __init__(self, message: str, reason: str = "bad_image") -> None:
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class PlaceholderMismatch(LatepixError, ValueError):
    """Pictures, placeholder ranges and placeholder tokens do not fit each other."""


class RolloutError(LatepixError, RuntimeError):
    """One rollout failed; it is recorded with its reason and the run goes on."""

    reason = "rollout_failed"


class EnvError(RolloutError):
    """The environment raised while playing or scoring a rollout."""

    reason = "environment_raised"


class RolloutTimeout(RolloutError):
    """A rollout did not come to its end in time."""

    reason = "timeout"


class InferenceError(RolloutError):
    """The inference server refused a request, failed, or gave an answer that does not fit."""

    reason = "inference_failed"


class TransportError(LatepixError, RuntimeError):
    """A batch or a set of weights could not be written, read or handed over.

    Attributes:
        status: HTTP status of the server's refusal; None if it was none.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class StaleWeights(TransportError):
    """The weights asked for are not the ones that are served."""


class HandshakeFailed(TransportError):
    """Server and trainer are set up differently, in a way that changes pixels, tokens or logprobs."""


class SchemaMismatch(TransportError):
    """The other side speaks another version of the wire format."""


class TrainerError(LatepixError, RuntimeError):
    """The training step cannot go on."""


class NonFiniteLoss(TrainerError):
    """The loss or the gradient is NaN or infinite; the step was refused."""


class CheckpointError(TrainerError):
    """A checkpoint or a model folder cannot be read or written."""


class ProcessFailed(LatepixError, RuntimeError):
    """A child process of `latepix rl` died or never came up."""


def reason_code(error: BaseException) -> str:
    """Return the stable code under which a failed rollout is counted."""
    if isinstance(error, PlaceholderMismatch):
        return "placeholder_mismatch"
    return str(getattr(error, "reason", None) or type(error).__name__)
