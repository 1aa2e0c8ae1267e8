"""The plugin in a running vLLM: what it says of itself, what its vision tower sees, updates that fail or succeed."""

from __future__ import annotations

import base64
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from latepix import get_adapter
from latepix.families.model_info import ModelInfo, read_model_info
from latepix.trace.ingress import InlineImage
from tests.tiny.pictures import make_image

pytestmark = pytest.mark.vllm

Publish = Callable[..., Path]


@pytest.fixture(scope="module")
def info(vllm_server: Any) -> ModelInfo:
    return read_model_info(vllm_server.model)


@pytest.fixture
def weights(vllm_server: Any, tmp_path: Path) -> Iterator[Publish]:
    """Write a weights folder: the model's own tensors, changed; the model's own weights are served again at the end."""
    own = load_file(vllm_server.model / "model.safetensors")

    def write(name: str, change: Callable[[dict[str, torch.Tensor]], object] = dict) -> Path:
        tensors = {key: tensor.clone() for key, tensor in own.items()}
        change(tensors)
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        return tmp_path / name

    yield write
    assert update(vllm_server, write("own"), "step-0") == (200, "")


def call(server: Any, method: str, route: str, body: Any = None) -> tuple[int, Any]:
    """Send a request; returns the status and the decoded answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        server.base_url + route, data=data, method=method, headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def update(server: Any, path: Path, version: str) -> tuple[int, str]:
    """Update the weights as the client does; returns the status and the reason of the first call that fails."""
    call(server, "POST", "/init_weight_transfer_engine", {"init_info": {}})
    call(server, "POST", "/pause?mode=keep")
    try:
        for route, body in (
            ("/start_weight_update", None),
            ("/update_weights", {"update_info": {"path": str(path)}}),
            ("/finish_weight_update", {"weight_version": version}),
        ):
            status, answer = call(server, "POST", route, body)
            if status != 200:
                return status, answer["error"]["message"]
    finally:
        call(server, "POST", "/resume")
    return 200, ""


def prompt(info: ModelInfo, images: list[InlineImage]) -> dict[str, Any]:
    slot = [info.image_placeholder_id, 10]
    parts = [{"type": "image_url", "url": image.url} for image in images]
    return {"token_ids": [5, 6, 7, *slot * len(images), 8, 9], "content_parts": parts}


def logprobs(server: Any, info: ModelInfo) -> list[float]:
    """Return the logprobs of a greedy answer to a fixed prompt with a picture."""
    body = {
        **prompt(info, [make_image(width=64, height=64)]),
        "sampling_params": {"temperature": 0.0, "max_tokens": 8, "logprobs": 0},
    }
    status, answer = call(server, "POST", "/inference/v1/generate", body)
    assert status == 200, answer
    return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]


def version(server: Any) -> str:
    return call(server, "GET", "/weight_info")[1]["weight_version"]


def spoil(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    """Return a change that adds noise to one tensor."""
    generator = torch.Generator().manual_seed(1)
    return lambda tensors: tensors[name].add_(torch.randn(tensors[name].shape, generator=generator))


NORM = "model.language_model.norm.weight"
ATTENTION = "model.language_model.layers.0.self_attn.q_proj.weight"


def test_facts_describe_the_running_server(vllm_server: Any, info: ModelInfo) -> None:
    status, facts = call(vllm_server, "GET", "/latepix/facts")
    assert status == 200
    assert facts["engine"] == "vllm"
    assert set(facts["versions"]) == {"engine", "torch", "transformers", "tokenizers", "pillow"}
    assert facts["model"] == str(vllm_server.model)
    assert facts["model_type"] == "qwen3_vl"
    assert facts["dtype"] == "float32"
    assert facts["weight_transfer"] == "safetensors_dir"
    assert facts["logprobs_mode"] == "processed_logprobs"
    assert facts["weight_version"] == version(vllm_server)
    assert facts["tokenizer"]["added_ids"]["<|image_pad|>"] == info.image_placeholder_id
    assert len(facts["tokenizer"]["vocab_sha256"]) == 64
    assert facts["image_processor"]["do_normalize"] is True
    assert facts["image_processor"]["patch_size"] == 16
    assert facts["mm_limits"]["image"] >= 1


@pytest.mark.parametrize("sizes", [[(64, 64)], [(32, 96), (128, 64)], []], ids=["one", "two", "none"])
def test_pixels_are_those_of_the_trainer(vllm_server: Any, info: ModelInfo, sizes: list[tuple[int, int]]) -> None:
    images = [make_image(width=width, height=height, seed=seed) for seed, (width, height) in enumerate(sizes)]
    status, answer = call(vllm_server, "POST", "/latepix/pixels", prompt(info, images))
    assert status == 200, answer
    adapter = get_adapter("qwen3_vl")
    processor = adapter.load_processor(vllm_server.model)
    ranges = answer["mm_placeholders"].get("image", [])
    assert len(answer["images"]) == len(ranges) == len(images)
    for image, seen, placed in zip(images, answer["images"], ranges, strict=True):
        own = adapter.process_image(processor, image.open())
        pixels = np.frombuffer(base64.b64decode(seen["data"]), dtype="<f4").reshape(seen["shape"])
        assert tuple(seen["grid_thw"]) == own.grid_thw
        assert placed["length"] == own.num_tokens
        run = answer["prompt_token_ids"][placed["offset"] : placed["offset"] + placed["length"]]
        assert run == [info.image_placeholder_id] * own.num_tokens
        # Rescaling and normalizing in one step or in two rounds differently in the last bit.
        np.testing.assert_allclose(pixels, own.pixel_values.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ([], "The body must be"),
        ({"token_ids": []}, "token_ids must be"),
        ({"token_ids": [1, -1]}, "token_ids must be"),
        ({"token_ids": [1], "content_parts": [{"type": "text", "text": "hi"}]}, "content_parts[0] must be"),
        (
            {"token_ids": [1], "content_parts": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "url must be a data",
        ),
        (
            {"token_ids": [1], "content_parts": [{"type": "image_url", "url": "http://127.0.0.1/x"}]},
            "url must be a data",
        ),
        ({"token_ids": [1], "content_parts": [{"type": "image_url", "url": "data:,"}]}, "0 placeholders"),
    ],
)
def test_pixels_refuse_what_they_cannot_show(vllm_server: Any, body: Any, reason: str) -> None:
    status, answer = call(vllm_server, "POST", "/latepix/pixels", body)
    assert status == 400
    assert reason in answer["error"]["message"]


def test_pixels_refuse_a_damaged_picture(vllm_server: Any, info: ModelInfo) -> None:
    body = prompt(info, [make_image()])
    part = {"type": "image_url", "url": "data:image/png;base64,AAAA"}
    status, answer = call(vllm_server, "POST", "/latepix/pixels", {**body, "content_parts": [part]})
    assert status == 400
    assert "image" in answer["error"]["message"]


def test_pixels_refuse_an_expanded_prompt(vllm_server: Any, info: ModelInfo) -> None:
    body = prompt(info, [make_image(width=64, height=64)])
    expanded = call(vllm_server, "POST", "/latepix/pixels", body)[1]["prompt_token_ids"]
    status, answer = call(vllm_server, "POST", "/latepix/pixels", {**body, "token_ids": expanded})
    assert status == 400
    assert "4 placeholders" in answer["error"]["message"]


def test_pixels_come_with_the_prompt_that_generate_reports(vllm_server: Any, info: ModelInfo) -> None:
    body = prompt(info, [make_image(width=64, height=32), make_image(width=32, height=32)])
    shown = call(vllm_server, "POST", "/latepix/pixels", body)[1]
    status, answer = call(
        vllm_server,
        "POST",
        "/inference/v1/generate",
        {**body, "sampling_params": {"max_tokens": 1}, "return_token_ids": True},
    )
    assert status == 200
    assert answer["prompt_token_ids"] == shown["prompt_token_ids"]
    assert answer["mm_placeholders"] == shown["mm_placeholders"]


def test_a_good_update_is_served(vllm_server: Any, info: ModelInfo, weights: Publish) -> None:
    before = logprobs(vllm_server, info)
    assert update(vllm_server, weights("new", spoil(NORM)), "step-1") == (200, "")
    assert logprobs(vllm_server, info) != before
    assert version(vllm_server) == "step-1"


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def add_pickle(folder: Path) -> None:
    (folder / "training_state.pt").write_bytes(b"\x80\x04.")


def pickle_for_safetensors(folder: Path) -> None:
    torch.save({"a": torch.zeros(2)}, folder / "model.safetensors")


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "spoil_folder", "reason"),
    [
        (dict, shutil.rmtree, "there is no such folder"),
        (lambda tensors: tensors.pop(ATTENTION), None, f"1 missing: {ATTENTION}"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), None, "1 unknown: extra"),
        (lambda tensors: tensors.update({NORM: torch.zeros(3)}), None, f"1 of another shape: {NORM} (got [3]"),
        (dict, cut_off, "model.safetensors ("),
        (dict, add_pickle, "training_state.pt is a pickle"),
        (dict, pickle_for_safetensors, "not a whole safetensors file"),
        (dict, only_pickle, "holds no *.safetensors"),
    ],
    ids=["no_folder", "missing", "unknown", "shape", "cut_off", "pickle", "disguised", "only_pickle"],
)
def test_a_failed_update_leaves_the_old_weights(
    vllm_server: Any,
    info: ModelInfo,
    weights: Publish,
    change: Callable[[dict[str, torch.Tensor]], object],
    spoil_folder: Callable[[Path], object] | None,
    reason: str,
) -> None:
    assert update(vllm_server, weights("before", spoil(ATTENTION)), "step-1") == (200, "")
    before = logprobs(vllm_server, info)
    folder = weights("bad", change)
    if spoil_folder is not None:
        spoil_folder(folder)
    status, message = update(vllm_server, folder, "step-2")
    assert status >= 400
    assert reason in message
    assert logprobs(vllm_server, info) == before
    assert version(vllm_server) == "step-1"
    assert update(vllm_server, weights("next", spoil(NORM)), "step-2") == (200, "")
    assert logprobs(vllm_server, info) != before
    assert version(vllm_server) == "step-2"


def as_four_bits(file: Path, name: str) -> None:
    """Store one tensor as 4-bit floats: the shape stays the same, and only copying it into the weight fails."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:start]), b""
    for key, entry in sorted(header.items(), key=lambda item: item[1].get("data_offsets", [0])):
        if key == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        if key == name:
            entry["dtype"], last = "F4", first + (last - first) // 8
        entry["data_offsets"] = [len(data), len(data) + last - first]
        data += content[start + first : start + last]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_a_load_that_fails_half_way_restores_a_deleted_folder(
    vllm_server: Any, info: ModelInfo, weights: Publish
) -> None:
    served = weights("served", spoil(ATTENTION))
    assert update(vllm_server, served, "step-1") == (200, "")
    before = logprobs(vllm_server, info)
    shutil.rmtree(served)
    folder = weights("half")
    as_four_bits(folder / "model.safetensors", "model.visual.merger.linear_fc2.weight")
    status, message = update(vllm_server, folder, "step-2")
    assert status >= 400
    assert "are served again" in message
    assert logprobs(vllm_server, info) == before
    assert update(vllm_server, weights("next", spoil(NORM)), "step-2") == (200, "")
    assert logprobs(vllm_server, info) != before


def test_a_version_needs_weights(vllm_server: Any, info: ModelInfo, weights: Publish) -> None:
    before = version(vllm_server)
    assert call(vllm_server, "POST", "/start_weight_update")[0] == 200
    status, answer = call(vllm_server, "POST", "/finish_weight_update", {"weight_version": "step-9"})
    assert status >= 400
    assert "loaded nothing" in answer["error"]["message"]
    assert version(vllm_server) == before
    # A failing update ends the session that is still open.
    assert call(vllm_server, "POST", "/update_weights", {"update_info": {"path": "/nowhere"}})[0] >= 400
