from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latepix.errors import ConfigError
from latepix.families.model_info import read_model_info
from latepix.families.registry import family_of
from tests.tiny.pictures import make_image


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's small files that a test may damage."""
    out = tmp_path / "model"
    out.mkdir()
    for file in tiny_model.glob("*.json"):
        shutil.copyfile(file, out / file.name)
    return out


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_the_special_ids_are_those_of_the_tokenizer(tiny_model: Path) -> None:
    info = read_model_info(tiny_model)
    added = json.loads((tiny_model / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    ids = {entry["content"]: entry["id"] for entry in added}
    assert info.placeholder_ids == (ids["<|image_pad|>"], ids["<|video_pad|>"])
    assert info.image_placeholder_id == ids["<|image_pad|>"]
    assert info.stop_ids == (ids["<|im_end|>"], ids["<|endoftext|>"])


def test_everything_special_but_the_end_of_a_turn_is_banned(tiny_model: Path) -> None:
    info = read_model_info(tiny_model)
    added = json.loads((tiny_model / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    specials = {entry["id"] for entry in added if entry["special"]}
    behind_the_last = set(range(max(entry["id"] for entry in added) + 1, info.vocab_size))
    assert set(info.banned_ids) == (specials | behind_the_last) - set(info.stop_ids)
    # Markers of tool calls are part of an answer.
    markers = {entry["id"] for entry in added if not entry["special"]}
    assert markers
    assert not markers & set(info.banned_ids)


@pytest.mark.parametrize(("size", "expected"), [((32, 32), 1), ((64, 96), 6), ((70, 45), 2), ((10, 100), 4)])
def test_the_tokens_of_a_picture_are_those_of_its_processed_size(
    tiny_model: Path, size: tuple[int, int], expected: int
) -> None:
    # 10 x 100 pixels would round to no row at all; the processor enlarges them to 32 x 128.
    assert read_model_info(tiny_model).num_image_tokens(make_image(width=size[0], height=size[1])) == expected


def test_a_missing_folder_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"Model folder {tmp_path}/none does not exist \(model.path\).*latepix tiny"):
        read_model_info(tmp_path / "none")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=rf"has no {name}"):
        read_model_info(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "preprocessor_config.json"])
def test_a_file_that_is_not_json_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{name} is not JSON"):
        read_model_info(folder)


def test_an_unknown_family_is_named_with_the_known_ones(folder: Path) -> None:
    change(folder / "config.json", lambda config: config.update(model_type="llava"))
    with pytest.raises(ConfigError, match=r"config.json: model_type 'llava' is not a known family. Known: .*qwen3_vl"):
        read_model_info(folder)


def test_a_missing_special_token_is_named(folder: Path) -> None:
    def rename(content: dict[str, Any]) -> None:
        for entry in content["added_tokens"]:
            entry["content"] = entry["content"].replace("<|image_pad|>", "<|other|>")

    change(folder / "tokenizer.json", rename)
    with pytest.raises(ConfigError, match=r"tokenizer.json lacks the special tokens \['<\|image_pad\|>'\]"):
        read_model_info(folder)


@pytest.mark.parametrize("key", ["patch_size", "merge_size", "size"])
def test_missing_settings_of_the_processor_are_named(folder: Path, key: str) -> None:
    change(folder / "preprocessor_config.json", lambda settings: settings.pop(key))
    with pytest.raises(
        ConfigError, match="the image processor's settings lack patch_size, merge_size or the pixel limits"
    ):
        read_model_info(folder)


def test_the_registry_knows_its_families() -> None:
    assert family_of("qwen3_vl").media_tokens[0] == "<|image_pad|>"
    with pytest.raises(ConfigError, match="register_adapter"):
        family_of("llava")


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("config.json", lambda config: config["text_config"].pop("vocab_size")),
        ("config.json", lambda config: config.update(text_config=[])),
        ("tokenizer.json", lambda tokenizer: tokenizer["model"].pop("vocab")),
        ("tokenizer.json", lambda tokenizer: tokenizer.update(added_tokens=[{"id": 1}])),
    ],
)
def test_a_file_that_lacks_a_fact_is_a_wrong_setting(folder: Path, name: str, edit: Callable[[Any], object]) -> None:
    change(folder / name, edit)
    with pytest.raises(ConfigError, match=r"\(model.path\): config.json or tokenizer.json lacks"):
        read_model_info(folder)


def test_a_file_that_holds_no_object_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config.json holds a JSON list, wanted an object"):
        read_model_info(folder)
