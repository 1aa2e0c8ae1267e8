"""A tiny folder = a hub download, as far as Hugging Face and `renderers` can tell. Same seed, same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from renderers import create_renderer
from renderers.configs import Qwen3VLRendererConfig
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from latepix.errors import ConfigError
from latepix.families.model_info import read_model_info
from latepix.families.registry import get_adapter
from latepix.families.tiny import make_tiny
from latepix.families.tiny_configs import TinySize
from tests.tiny.policy import draw

SMALL = TinySize(hidden=32, layers=1, vision_depth=1, vision_hidden=32, vision_intermediate=32)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_the_auto_classes_load_it(tiny_model: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    processor = AutoImageProcessor.from_pretrained(tiny_model)
    info = read_model_info(tiny_model)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert model.config.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>") == info.image_placeholder_id
    assert model.config.text_config.vocab_size == info.vocab_size >= len(tokenizer)
    assert processor.patch_size * processor.merge_size == info.grid.factor
    assert tokenizer.decode(tokenizer.encode("which digit is it? 7")) == "which digit is it? 7"


def test_renderers_and_its_own_chat_template_agree(tiny_model: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    renderer: Any = create_renderer(tokenizer, Qwen3VLRendererConfig())
    messages = [
        {"role": "system", "content": "answer with one word"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": draw(32, 32, seed=1).url}},
                {"type": "text", "text": "which digit?"},
            ],
        },
    ]
    rendered = renderer.render(messages, add_generation_prompt=True, process_multimodal=False)
    template = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(rendered.token_ids) == list(template)
    assert list(rendered.token_ids).count(read_model_info(tiny_model).image_placeholder_id) == 1


def test_same_seed_same_bytes_other_seed_other_weights(tmp_path: Path) -> None:
    one, same, other = (
        bytes_of(make_tiny("qwen3_vl", tmp_path / name, seed=seed, size=SMALL))
        for name, seed in (("one", 5), ("same", 5), ("other", 6))
    )
    assert one == same
    assert {name for name in one if one[name] != other[name]} == {"model.safetensors"}


def test_making_one_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    make_tiny("qwen3_vl", tmp_path / "model", size=SMALL)
    assert torch.equal(torch.rand(2), wanted)


def test_an_empty_folder_is_taken_and_a_full_one_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make_tiny("qwen3_vl", tmp_path / "empty", size=SMALL)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="not an empty folder"):
        make_tiny("qwen3_vl", tmp_path / "full")
    assert bytes_of(tmp_path / "full") == {"thesis.tex": b"years of work"}


def test_an_unknown_family_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'llava'.*Known: .*qwen3_vl"):
        make_tiny("llava", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_weights_that_are_not_those_of_the_config_are_refused(tmp_path: Path) -> None:
    """Hugging Face would fill a missing layer with random numbers, others in the server than in the trainer."""
    folder = make_tiny("qwen3_vl", tmp_path / "tiny", size=SMALL)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    adapter = get_adapter("qwen3_vl")
    with pytest.raises(ConfigError, match=r"weights in .* are not those of its config.json: \d+ missing keys"):
        adapter.load_model(folder, dtype=torch.float32, device="cpu")


def test_a_processor_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("qwen3_vl", tmp_path / "tiny", size=SMALL)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"patch_size": 14}))
    with pytest.raises(ConfigError, match=r"patch_size x merge_size is 28.*config.json has 32"):
        read_model_info(folder)
