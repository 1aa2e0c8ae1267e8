from __future__ import annotations

import pickle

import pytest

from latepix import errors
from latepix.errors import EnvError, ImageError, InferenceError, LatepixError, PlaceholderMismatch, reason_code

TREE = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, LatepixError)]


@pytest.mark.parametrize("cls", TREE)
def test_every_error_survives_pickling(cls: type[LatepixError]) -> None:
    again = pickle.loads(pickle.dumps(cls("what, where, got, wanted")))
    assert type(again) is cls
    assert str(again) == "what, where, got, wanted"


def test_the_reason_of_an_image_error_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(ImageError("too large", "too_many_pixels")))
    assert (str(again), again.reason) == ("too large", "too_many_pixels")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ImageError("x", "truncated"), "truncated"),
        (PlaceholderMismatch("x"), "placeholder_mismatch"),
        (EnvError("x"), "environment_raised"),
        (InferenceError("x"), "inference_failed"),
        (KeyError("x"), "KeyError"),
    ],
)
def test_failed_rollouts_are_counted_under_stable_codes(error: BaseException, code: str) -> None:
    assert reason_code(error) == code
