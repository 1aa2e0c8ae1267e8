"""Known families, families of other packages, and the hub layout of each."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from latepix.errors import CheckpointError, ConfigError
from latepix.families import registry
from latepix.families.model_info import read_model_info
from latepix.families.registry import Family, family_of, get_adapter, known_families, register_adapter
from latepix.families.tiny import TINY_FAMILIES, make_tiny

MINE = Family(
    model_type="my_vl",
    adapter="latepix.families.kimi_k25:KimiK25Adapter",
    renderer="qwen3-vl",
    stop_tokens=("<|im_end|>",),
    media_tokens=("<|image_pad|>",),
)
NOT_A_FAMILY = 3
#: Tensors that each family's published checkpoints have.
HUB_NAMES = {
    "kimi_k25": (
        "language_model.model.layers.0.self_attn.kv_b_proj.weight",
        "language_model.lm_head.weight",
        "vision_tower.patch_embed.proj.weight",
        "vision_tower.encoder.blocks.0.wqkv.weight",
        "mm_projector.proj.0.weight",
    ),
    "qwen2_5_vl": ("model.layers.0.self_attn.q_proj.weight", "visual.patch_embed.proj.weight"),
    "qwen3_5": ("model.language_model.layers.0.linear_attn.A_log", "model.visual.patch_embed.proj.weight"),
    "qwen3_5_moe": ("model.language_model.layers.0.mlp.experts.gate_up_proj",),
    "qwen3_vl": ("model.language_model.layers.0.self_attn.q_norm.weight",),
    "qwen3_vl_moe": ("model.language_model.layers.0.mlp.experts.gate_up_proj",),
}


@pytest.fixture(scope="module", params=TINY_FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param) / "tiny")


@pytest.fixture
def clean_registry() -> Iterator[None]:
    before = dict(registry._FAMILIES)
    yield
    registry._FAMILIES.clear()
    registry._FAMILIES.update(before)


def load(folder: Path) -> tuple[Any, Any]:
    adapter = get_adapter(read_model_info(folder).model_type)
    return adapter, adapter.load_model(folder, dtype=torch.float32, device="cpu")


def test_every_tiny_family_is_known() -> None:
    assert known_families() == sorted(TINY_FAMILIES)


def test_an_unknown_family_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"model_type 'llava' is not a known family. Known: kimi_k25, .*qwen3_vl_moe"):
        family_of("llava", where="config.json")
    with pytest.raises(ConfigError, match=r"no tiny model for family 'llava'"):
        make_tiny("llava", Path("unused"))


@pytest.mark.usefixtures("clean_registry")
def test_a_family_can_be_registered() -> None:
    register_adapter(MINE)
    assert family_of("my_vl") is MINE
    assert type(get_adapter("my_vl")).__name__ == "KimiK25Adapter"


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("tests.unit.families.test_registry:MINE", None),
        ("tests.unit.families.test_registry:NOT_A_FAMILY", "is a int, wanted a"),
        ("no_such_package:FAMILY", "cannot be imported"),
    ],
)
def test_other_packages_are_found_by_their_entry_point(
    monkeypatch: pytest.MonkeyPatch, value: str, problem: str | None
) -> None:
    entry = metadata.EntryPoint(name="my_vl", value=value, group=registry.ENTRY_POINTS)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry] if group == registry.ENTRY_POINTS else [])
    if problem is None:
        assert family_of("my_vl").model_type == "my_vl"
    else:
        with pytest.raises(ConfigError, match=problem):
            family_of("my_vl")


def test_what_is_published_is_what_the_folder_holds(folder: Path) -> None:
    adapter, model = load(folder)
    published, held = adapter.hub_state_dict(model), load_file(folder / "model.safetensors")
    assert published.keys() == held.keys()
    assert all(torch.equal(published[name], held[name]) for name in held)
    missing = [name for name in HUB_NAMES[read_model_info(folder).model_type] if name not in held]
    assert not missing


def test_weights_in_hub_layout_come_back_to_the_class(folder: Path) -> None:
    adapter, model = load(folder)
    changed = {name: tensor + 0.25 for name, tensor in adapter.hub_state_dict(model).items()}
    adapter.load_hub_state_dict(model, changed)
    again = adapter.hub_state_dict(model)
    assert all(torch.equal(again[name], changed[name]) for name in changed)


def test_weights_that_do_not_fit_change_nothing(folder: Path) -> None:
    adapter, model = load(folder)
    before = {name: tensor.clone() for name, tensor in adapter.hub_state_dict(model).items()}
    name = next(iter(before))
    for wrong in (
        {key: tensor + 1 for key, tensor in before.items() if key != name},
        {**before, "model.nonsense": torch.zeros(1)},
        {**before, name: torch.zeros(1)},
    ):
        with pytest.raises(CheckpointError, match="do not fit the model"):
            adapter.load_hub_state_dict(model, wrong)
    assert all(torch.equal(tensor, before[key]) for key, tensor in adapter.hub_state_dict(model).items())


def test_experts_are_transposed_in_the_hub(tmp_path: Path) -> None:
    folder = make_tiny("qwen3_vl_moe", tmp_path / "tiny")
    adapter, model = load(folder)
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    own = dict(model.named_parameters())[name]
    assert torch.equal(adapter.hub_state_dict(model)[name], own.transpose(1, 2))
