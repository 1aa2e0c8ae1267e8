"""Folders of weights are opened and compared before a model is touched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from latepix_vllm.weight_files import WeightFolder, WeightFolderError, check_replaces, refuse_pickles

MODEL = {"embed.weight": (4, 3), "layers.0.q.weight": (3, 3), "norm.weight": (3,)}


def write(folder: Path, shapes: dict[str, tuple[int, ...]], *, file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: torch.full(shape, 2.0) for name, shape in shapes.items()}, folder / file)
    return folder


def why_not(tmp_path: Path, new: dict[str, tuple[int, ...]], served: dict[str, tuple[int, ...]], **how: bool) -> str:
    """Return the reason why one folder may not replace another, empty if it may."""
    with WeightFolder(write(tmp_path / "new", new)) as one, WeightFolder(write(tmp_path / "served", served)) as other:
        try:
            check_replaces(one, other, is_tied=how.get("is_tied", False))
        except WeightFolderError as error:
            return str(error)
    return ""


def test_a_folder_knows_its_shapes_and_yields_its_tensors(tmp_path: Path) -> None:
    with WeightFolder(write(tmp_path / "new", MODEL)) as folder:
        assert folder.shapes == MODEL
        tensors = dict(folder.tensors())
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == MODEL
    assert tensors["norm.weight"].tolist() == [2.0, 2.0, 2.0]


def test_an_open_folder_survives_its_deletion(tmp_path: Path) -> None:
    with WeightFolder(write(tmp_path / "new", MODEL)) as folder:
        shutil.rmtree(tmp_path / "new")
        assert dict(folder.tensors())["norm.weight"].tolist() == [2.0, 2.0, 2.0]


def test_files_of_the_index_are_read_and_no_others(tmp_path: Path) -> None:
    folder = write(tmp_path / "new", {"a": (1,)}, file="model-1.safetensors")
    write(folder, {"b": (1,)}, file="model-2.safetensors")
    write(folder, {"a": (9,)}, file="consolidated.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with WeightFolder(folder) as opened:
        assert opened.shapes == {"a": (1,), "b": (1,)}


def index_leads_outside(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../served/model.safetensors"}}')


def index_is_no_json(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def index_lists_a_missing_file(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def empty_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def pickle_for_safetensors(folder: Path) -> None:
    torch.save({"a": torch.zeros(2)}, folder / "model.safetensors")


def same_name_twice(folder: Path) -> None:
    write(folder, {"norm.weight": (3,)}, file="more.safetensors")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (shutil.rmtree, "there is no such folder"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"holds no \*\.safetensors, only nothing"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "a.bin"), r"no \*\.safetensors, only a\.bin"),
        (cut_off, r"model\.safetensors \(\d+ bytes\) is not a whole safetensors file"),
        (empty_file, r"\(0 bytes\) is not a whole safetensors file"),
        (pickle_for_safetensors, "is not a whole safetensors file"),
        (same_name_twice, r"norm\.weight is in more\.safetensors and in another file"),
        (index_leads_outside, "only files beside it are read"),
        (index_is_no_json, "is not readable"),
        (index_lists_a_missing_file, r"gone\.safetensors \(not a file\)"),
    ],
)
def test_a_folder_that_cannot_be_read_says_why(tmp_path: Path, spoil: Callable[[Path], object], reason: str) -> None:
    folder = write(tmp_path / "new", MODEL)
    spoil(folder)
    with pytest.raises(WeightFolderError, match=reason):
        WeightFolder(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "state.pt", "a.pkl", "last.ckpt"])
def test_a_published_pickle_is_refused(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "new", MODEL)
    refuse_pickles(folder)
    (folder / name).write_bytes(b"\x80\x04.")
    with pytest.raises(WeightFolderError, match=f"{name} is a pickle"):
        refuse_pickles(folder)


def test_the_same_tensors_may_be_served(tmp_path: Path) -> None:
    assert why_not(tmp_path, MODEL, MODEL) == ""


def test_every_difference_is_named_with_what_was_wanted(tmp_path: Path) -> None:
    new = {"embed.weight": (5, 3), "layers.0.q.weight": (3, 3), "norm.bias": (3,)}
    reason = why_not(tmp_path, new, MODEL)
    assert "1 missing: norm.weight" in reason
    assert "1 unknown: norm.bias" in reason
    assert "1 of another shape: embed.weight (got [5, 3], wanted [4, 3])" in reason


def test_long_lists_are_cut(tmp_path: Path) -> None:
    served = MODEL | {f"layers.{index}.k.weight": (1,) for index in range(9)}
    assert "9 missing: layers.0.k.weight, layers.1.k.weight, layers.2.k.weight, ..." in why_not(tmp_path, MODEL, served)


@pytest.mark.parametrize("name", ["lm_head.weight", "language_model.lm_head.weight"])
def test_a_tied_output_layer_may_be_on_either_side(tmp_path: Path, name: str) -> None:
    with_head = MODEL | {name: (4, 3)}
    for new, served in ((with_head, MODEL), (MODEL, with_head)):
        assert why_not(tmp_path, new, served, is_tied=True) == ""
        assert name in why_not(tmp_path, new, served, is_tied=False)


def test_a_draft_model_of_the_hub_checkpoint_need_not_be_published(tmp_path: Path) -> None:
    assert why_not(tmp_path, MODEL, MODEL | {"mtp.fc.weight": (3, 6)}) == ""
