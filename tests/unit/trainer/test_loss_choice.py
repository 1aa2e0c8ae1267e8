"""Loss settings, and losses of one's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from latepix.config.losses import LossConfig
from latepix.errors import ConfigError, TrainerError
from latepix.trainer.loss import LossInputs, cispo, grpo_clip, gspo, policy_loss, trust_region
from latepix.trainer.loss_choice import loss_of

MODULE = """
import torch

def reinforce(inputs, scale=1.0):
    return -scale * inputs.advantages * inputs.trainer_logprobs

def summed(inputs):
    return reinforce(inputs).sum()

def detached(inputs):
    return reinforce(inputs).detach()

def number(inputs):
    return 0.0

constant = 3
"""


@pytest.fixture(autouse=True)
def my_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text(MODULE)
    (tmp_path / "my_broken_losses.py").write_text("import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)


def make_inputs() -> LossInputs:
    return LossInputs(
        trainer_logprobs=torch.tensor([0.4, 0.1, 0.2]).log().requires_grad_(),
        inference_logprobs=torch.tensor([0.2, 0.2, 0.1]).log(),
        advantages=torch.tensor([1.0, -1.0, 1.0]),
        entropies=torch.ones(3),
        num_loss_tokens=3,
        sample_ids=torch.tensor([0, 0, 1]),
        num_loss_samples=2,
    )


@pytest.mark.parametrize(
    ("settings", "terms", "how"),
    [
        ({}, lambda i: trust_region(i, max_prob_increase=0.2, max_prob_decrease=0.2), {}),
        ({"type": "grpo_clip", "clip_high": 0.3}, lambda i: grpo_clip(i, clip_low=0.2, clip_high=0.3), {}),
        (
            {"type": "cispo", "entropy_bonus": 0.1},
            lambda i: cispo(i, clip_low=1.0, clip_high=4.0),
            {"entropy_bonus": 0.1},
        ),
        ({"type": "gspo"}, lambda i: gspo(i, clip_low=3e-4, clip_high=4e-4), {"denominator": "samples"}),
        ({"type": "gspo", "denominator": "tokens"}, lambda i: gspo(i, clip_low=3e-4, clip_high=4e-4), {}),
    ],
)
def test_settings_reach_the_loss(settings: dict[str, Any], terms: Any, how: dict[str, Any]) -> None:
    inputs = make_inputs()
    assert torch.equal(loss_of(LossConfig(**settings))(inputs).loss, policy_loss(inputs, terms(inputs), **how).loss)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"clip_low": 0.1}, "clip_low has no effect with trainer.loss.type = 'trust_region'"),
        ({"type": "gspo", "dual_clip": 3.0}, "dual_clip has no effect with trainer.loss.type = 'gspo'"),
        ({"type": "my_losses:reinforce", "clip_low": 0.1}, "clip_low has no effect"),
        ({"type": "grpo_clip", "args": {"scale": 2}}, "args has no effect"),
        ({"type": "ppo"}, "String should match pattern"),
        ({"type": "grpo_clip", "dual_clip": 1.0}, "greater than 1"),
        ({"importance_cap": 0.5}, "greater than or equal to 1"),
    ],
)
def test_settings_of_another_loss_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        LossConfig(**settings)


def test_a_custom_loss_gives_each_token_a_term() -> None:
    inputs = make_inputs()
    outputs = loss_of(LossConfig(type="my_losses:reinforce", args={"scale": 2.0}))(inputs)
    wanted = -2 * (inputs.advantages * inputs.trainer_logprobs).sum() / 3
    assert float(outputs.loss.detach()) == pytest.approx(float(wanted.detach()))
    assert outputs.sums["loss/mismatch_kl/mean"] > 0


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("summed", r"my_losses:summed returned shape \(\), wanted \(3,\): one term for each trained token"),
        ("detached", r"my_losses:detached returned a tensor without gradient"),
        ("number", r"my_losses:number returned a float, wanted a tensor of shape \(3,\)"),
    ],
)
def test_what_a_custom_loss_returns_is_checked(name: str, problem: str) -> None:
    loss = loss_of(LossConfig(type=f"my_losses:{name}"))
    with pytest.raises(TrainerError, match=problem):
        loss(make_inputs())


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("my_losses:missing", "cannot be imported .AttributeError"),
        ("no_such_module:loss", "cannot be imported .ModuleNotFoundError"),
        (
            "my_broken_losses:loss",
            "cannot be imported .ModuleNotFoundError: No module named .a_module_that_is_not_there",
        ),
        ("my_losses:constant", "is a int, wanted a function"),
    ],
)
def test_a_custom_loss_that_is_not_there_is_named(place: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        loss_of(LossConfig(type=place))
