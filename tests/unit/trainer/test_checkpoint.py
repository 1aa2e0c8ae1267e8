from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from latepix.errors import CheckpointError, ConfigError
from latepix.families.base import torch_dtype
from latepix.families.model_info import read_model_info
from latepix.trainer.checkpoint import export_model, write_weights
from tests.tiny.policy import Policy, load_policy, make_sample, score


@pytest.fixture
def policy(tiny_model: Path) -> Policy:
    return load_policy(tiny_model)


def shift(policy: Policy) -> None:
    """Train, in a way."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.adapter.hub_state_dict(policy.model).items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_exported_folder_loads_in_hugging_face_and_is_the_model(policy: Policy, tmp_path: Path) -> None:
    shift(policy)
    out = export_model(policy.path, tmp_path / "model", policy.model, policy.adapter)
    loaded: Any = AutoModelForImageTextToText.from_pretrained(out)
    assert loaded.dtype == torch.float32
    assert_same(dict(loaded.state_dict()), dict(policy.model.state_dict()))
    # Tied: one tensor in the file, one storage in the model.
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    assert loaded.lm_head.weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == (policy.path / "chat_template.jinja").read_text()
    assert AutoImageProcessor.from_pretrained(out).size == AutoImageProcessor.from_pretrained(policy.path).size
    assert read_model_info(out).banned_ids == policy.info.banned_ids


def test_an_exported_folder_gives_the_same_logprobs(policy: Policy, tmp_path: Path) -> None:
    shift(policy)
    samples = [make_sample(policy.info, 5)]
    exported = load_policy(export_model(policy.path, tmp_path / "model", policy.model, policy.adapter))
    assert torch.equal(score(exported, samples).trainer_logprobs, score(policy, samples).trainer_logprobs)


def test_exporting_again_replaces_the_folder_and_leaves_nothing_aside(policy: Policy, tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "old.txt").write_text("old")
    export_model(policy.path, out, policy.model, policy.adapter)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert not (out / "old.txt").exists()


def test_an_exported_folder_says_which_dtype_it_holds(tiny_model: Path, tmp_path: Path) -> None:
    halved = load_policy(tiny_model, dtype=torch_dtype("bfloat16"))
    out = export_model(tiny_model, tmp_path / "model", halved.model, halved.adapter)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}


def test_weights_survive_the_way_over_the_disk(policy: Policy, tiny_model: Path, tmp_path: Path) -> None:
    shift(policy)
    write_weights(tmp_path, policy.model, policy.adapter)
    other = load_policy(tiny_model)
    other.adapter.load_hub_state_dict(other.model, load_file(tmp_path / "model.safetensors"))
    assert_same(weights_of(other), weights_of(policy))
    samples = [make_sample(policy.info, 5)]
    assert torch.equal(score(other, samples).trainer_logprobs, score(policy, samples).trainer_logprobs)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(
            lambda tensors: tensors.pop("model.language_model.norm.weight"),
            r"missing \['model\.language_model\.norm\.weight'\].*\(1, 0 and 0 in all\)",
            id="missing",
        ),
        pytest.param(
            lambda tensors: tensors.update(extra=torch.zeros(1)), r"unknown \['extra'\].*\(0, 1 and 0", id="unknown"
        ),
        pytest.param(
            lambda tensors: tensors.update({"model.language_model.norm.weight": torch.zeros(7)}),
            r"other shape \['model\.language_model\.norm\.weight'\].*\(0, 0 and 1",
            id="other shape",
        ),
    ],
)
def test_weights_that_do_not_fit_change_nothing(policy: Policy, spoil: Any, message: str) -> None:
    before = weights_of(policy)
    tensors = {name: torch.ones_like(tensor) for name, tensor in before.items()}
    spoil(tensors)
    with pytest.raises(CheckpointError, match=message):
        policy.adapter.load_hub_state_dict(policy.model, tensors)
    assert_same(weights_of(policy), before)


def test_a_folder_that_is_no_model_is_a_config_error(tiny_model: Path, tmp_path: Path) -> None:
    adapter = load_policy(tiny_model).adapter
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"Cannot load the model in .* \(model\.path\)"):
        adapter.load_model(tmp_path, dtype=torch.float32, device="cpu")
