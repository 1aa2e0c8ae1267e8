from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from latepix.config.schema import RunConfig
from latepix.errors import HandshakeFailed
from latepix.families.model_info import ModelInfo
from latepix.inference.facts import (
    Difference,
    Facts,
    Needs,
    TokenizerFacts,
    check_handshake,
    compare_facts,
    needs_of,
    vocab_sha256,
)

VOCAB = {"a": 0, "b": 1, "<|im_end|>": 2}
TOKENIZER = TokenizerFacts(vocab_sha256=vocab_sha256(VOCAB), vocab_size=3, added_ids={"<|im_end|>": 2})
PROCESSOR: dict[str, Any] = {
    "class": "Qwen2VLImageProcessorPil",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_convert_rgb": True,
    "do_resize": True,
    "resample": 3,
    "size": {"shortest_edge": 1024, "longest_edge": 65536},
}


def make_facts(*, processor: dict[str, Any] | None = None, without: tuple[str, ...] = (), **changes: Any) -> Facts:
    """Build the facts of one side; `processor` changes settings of the image processor, `without` leaves some out."""
    settings = {name: value for name, value in (PROCESSOR | (processor or {})).items() if name not in without}
    facts = Facts(
        engine="vllm",
        versions={"engine": "0.32.0", "torch": "2.9.0"},
        model="/models/a",
        model_type="qwen3_vl",
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=256,
        data_parallel_size=1,
        logprobs_mode="processed_logprobs",
        weight_version="step-0",
        weight_transfer="safetensors_dir",
        tokenizer=TOKENIZER,
        image_processor=settings,
        mm_limits={"image": 64},
    )
    return msgspec.structs.replace(facts, **changes)


def make_needs(**changes: Any) -> Needs:
    needs = Needs(
        max_model_len=4096,
        group_size=8,
        max_images=64,
        weight_transfer="safetensors_dir",
        data_parallel_size=1,
        is_fitted=True,
    )
    return msgspec.structs.replace(needs, **changes)


#: As a trainer of the same model says it.
TRAINER = make_facts(engine="trainer", versions={"engine": "0.1.0", "torch": "2.9.0"}, logprobs_mode=None)


def compared(server: Facts, *, trainer: Facts = TRAINER, **needs: Any) -> list[Difference]:
    return compare_facts(server, trainer, make_needs(**needs))


def only(found: list[Difference]) -> Difference:
    (difference,) = found
    return difference


def test_two_sides_that_are_set_up_the_same_do_not_differ() -> None:
    assert compared(make_facts()) == []
    assert check_handshake(make_facts(), TRAINER, make_needs()) == []


@pytest.mark.parametrize(
    ("changes", "setting", "server", "trainer"),
    [
        ({"model_type": "qwen3_5"}, "model_type", "qwen3_5", "qwen3_vl"),
        ({"dtype": "bfloat16"}, "dtype", "bfloat16", "float32"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode", "raw_logprobs", "needs processed_logprobs"),
        ({"logprobs_mode": None}, "logprobs_mode", "None", "needs processed_logprobs"),
        ({"max_model_len": 4095}, "max_model_len", "4095", "needs at least 4096"),
        ({"max_num_seqs": 7}, "max_num_seqs", "7", "needs at least 8"),
        ({"weight_transfer": None}, "weight transfer", "None", "needs safetensors_dir"),
        ({"weight_transfer": "nccl"}, "weight transfer", "nccl", "needs safetensors_dir"),
        ({"weight_version": "step-4"}, "weight version", "step-4", "starts at step-0"),
        ({"mm_limits": {"image": 63}}, "pictures in a prompt", "63", "needs 64 (images.max_per_prompt)"),
        ({"mm_limits": {"vision_chunk": 1}}, "pictures in a prompt", "1", "needs 64 (images.max_per_prompt)"),
    ],
)
def test_a_setting_that_changes_the_run_is_fatal(
    changes: dict[str, Any], setting: str, server: str, trainer: str
) -> None:
    found = only(compared(make_facts(**changes)))
    assert (found.setting, found.server, found.trainer, found.is_fatal) == (setting, server, trainer, True)
    assert found.remedy


def test_too_few_ranks_are_fatal() -> None:
    found = only(compared(make_facts(data_parallel_size=1), data_parallel_size=2))
    assert (found.setting, found.server, found.is_fatal) == ("data_parallel_size", "1", True)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": None},
        {"max_model_len": None},
        {"max_model_len": 8192},
        {"max_num_seqs": None},
        {"data_parallel_size": 2},
        {"weight_version": "default"},
        {"weight_version": None},
        {"mm_limits": {}},
        {"mm_limits": {"image": 64, "video": 0}},
        {"prefix_caching": True},
        {"engine": "local", "logprobs_mode": None},
        {"versions": {"engine": "9", "vllm-only": "1"}},
    ],
)
def test_what_a_server_does_not_tell_or_has_more_of_does_not_matter(changes: dict[str, Any]) -> None:
    assert compared(make_facts(**changes)) == []


def test_a_server_that_reloads_by_itself_needs_no_backend() -> None:
    assert compared(make_facts(weight_transfer=None), weight_transfer=None) == []


@pytest.mark.parametrize(
    ("changes", "setting", "server", "trainer"),
    [
        ({"model": "/models/b"}, "model folder", "/models/b", "/models/a"),
        ({"dtype": None}, "dtype", "not told", "known"),
        ({"versions": {"engine": "0.32.0", "torch": "2.8.0"}}, "version of torch", "2.8.0", "2.9.0"),
        ({"tokenizer": None}, "tokenizer", "not told", "known"),
        ({"image_processor": None}, "image processor", "not told", "known"),
        ({"processor": {"class": "Fast"}}, "image processor: class", "Fast", "Qwen2VLImageProcessorPil"),
    ],
)
def test_a_setting_that_changes_nothing_is_harmless(
    changes: dict[str, Any], setting: str, server: str, trainer: str
) -> None:
    found = only(compared(make_facts(**changes)))
    assert (found.setting, found.server, found.trainer, found.is_fatal) == (setting, server, trainer, False)


def test_a_vocabulary_that_differs_is_fatal_with_both_hashes() -> None:
    other = vocab_sha256(VOCAB | {"c": 3})
    tokenizer = msgspec.structs.replace(TOKENIZER, vocab_sha256=other, vocab_size=4)
    found = only(compared(make_facts(tokenizer=tokenizer)))
    assert (found.setting, found.is_fatal) == ("vocabulary", True)
    assert found.server == f"4 tokens, sha256 {other[:12]}"
    assert found.trainer == f"3 tokens, sha256 {TOKENIZER.vocab_sha256[:12]}"


def test_added_tokens_that_differ_are_named_one_by_one() -> None:
    specials = {"<|im_end|>": 1, "<|video_pad|>": 7}
    found = compared(make_facts(tokenizer=msgspec.structs.replace(TOKENIZER, added_ids=specials)))
    assert [(one.setting, one.server, one.trainer, one.is_fatal) for one in found] == [
        ("added token <|im_end|>", "1", "2", True),
        # One more on one side is never sent.
        ("added token <|video_pad|>", "7", "None", False),
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("patch_size", 14),
        ("merge_size", 1),
        ("temporal_patch_size", 1),
        ("do_rescale", False),
        ("rescale_factor", 1 / 256),
        ("do_normalize", False),
        ("image_mean", [0.5, 0.5, 0.4]),
        ("image_std", [0.5, 0.5]),
        ("do_convert_rgb", False),
        ("merge_kernel_size", [2, 2]),
        ("in_patch_limit", 4096),
        ("patch_limit_on_one_side", 512),
        ("fixed_output_tokens", 256),
    ],
)
def test_processor_settings_that_decide_on_pixels_are_fatal(name: str, value: Any) -> None:
    found = only(compared(make_facts(processor={name: value})))
    assert (found.setting, found.server, found.trainer, found.is_fatal) == (
        f"image processor: {name}",
        str(value),
        str(PROCESSOR.get(name)),
        True,
    )


def test_a_pixel_setting_that_one_side_lacks_is_fatal() -> None:
    found = only(compared(make_facts(without=("do_convert_rgb",))))
    assert (found.setting, found.server, found.trainer, found.is_fatal) == (
        "image processor: do_convert_rgb",
        "None",
        "True",
        True,
    )


def test_a_processor_of_another_class_need_not_have_a_setting_for_what_it_always_does() -> None:
    found = compared(make_facts(processor={"class": "KimiK25VisionProcessor"}, without=("do_convert_rgb",)))
    assert {one.setting: one.is_fatal for one in found} == {
        "image processor: do_convert_rgb": False,
        "image processor: class": False,
    }


@pytest.mark.parametrize(("name", "value"), [("resample", 2), ("do_resize", False)])
@pytest.mark.parametrize("is_fitted", [True, False])
def test_how_pictures_are_resized_matters_only_if_they_are(name: str, value: Any, is_fitted: bool) -> None:
    found = only(compared(make_facts(processor={name: value}), is_fitted=is_fitted))
    assert (found.setting, found.server, found.trainer) == (
        f"image processor: {name}",
        str(value),
        str(PROCESSOR[name]),
    )
    assert found.is_fatal is not is_fitted
    assert "Use the same preprocessor_config.json" in found.remedy
    assert found.remedy.endswith("Or set images.fit = true.")


@pytest.mark.parametrize(
    ("size", "setting"),
    [
        ({"shortest_edge": 4096, "longest_edge": 65536}, "fewest pixels"),
        ({"shortest_edge": 1024, "longest_edge": 4096}, "most pixels"),
    ],
)
def test_pixel_limits_that_differ_are_fatal(size: dict[str, int], setting: str) -> None:
    found = only(compared(make_facts(processor={"size": size})))
    assert (found.setting, found.server, found.is_fatal) == (f"image processor: {setting}", "4096", True)


def test_pixel_limits_may_be_written_in_the_old_way() -> None:
    server = make_facts(processor={"min_pixels": 1024, "max_pixels": 65536}, without=("size",))
    assert compared(server) == []
    assert compared(make_facts(), trainer=msgspec.structs.replace(server, engine="trainer")) == []


def test_a_pixel_limit_in_size_counts_where_both_are_written() -> None:
    assert compared(make_facts(processor={"min_pixels": 5, "max_pixels": 6})) == []


def test_pixel_limits_in_the_old_way_are_compared() -> None:
    found = only(compared(make_facts(processor={"min_pixels": 1024, "max_pixels": 9}, without=("size",))))
    assert (found.setting, found.server, found.trainer) == ("image processor: most pixels", "9", "65536")


def test_numbers_are_compared_as_numbers() -> None:
    trainer = make_facts(processor={"image_mean": [0, 0.5, 1]})
    server = make_facts(
        processor={
            "image_mean": (0.0, 0.5, 1.0),
            "rescale_factor": 0.00392156862745098,
            "patch_size": 16.0,
            "size": {"shortest_edge": 1024.0, "longest_edge": 65536.0},
        }
    )
    assert compared(server, trainer=trainer) == []
    assert compared(trainer, trainer=server) == []


def test_fatal_differences_come_first() -> None:
    found = compared(make_facts(model="/models/b", tokenizer=None, dtype="bfloat16", logprobs_mode="raw_logprobs"))
    assert [(one.setting, one.is_fatal) for one in found] == [
        ("dtype", True),
        ("logprobs_mode", True),
        ("model folder", False),
        ("tokenizer", False),
    ]


def test_a_failed_handshake_lists_every_fatal_difference_with_both_values_and_the_remedy() -> None:
    with pytest.raises(HandshakeFailed) as caught:
        check_handshake(make_facts(model="/models/b", dtype="bfloat16", max_num_seqs=4), TRAINER, make_needs())
    first, *others = str(caught.value).splitlines()
    assert first.startswith("Server and trainer do not fit each other (2 of their settings)")
    assert others == [
        "  dtype: server bfloat16, trainer float32. Set model.dtype, or vLLM's --dtype, to the same on both.",
        "  max_num_seqs: server 4, trainer needs at least 8. Raise --max-num-seqs: a group is one request.",
    ]


def test_a_handshake_returns_what_is_harmless() -> None:
    found = check_handshake(make_facts(model="/models/b"), TRAINER, make_needs())
    assert [one.setting for one in found] == ["model folder"]


def test_the_hash_of_a_vocabulary_does_not_depend_on_its_order() -> None:
    assert vocab_sha256(dict(reversed(VOCAB.items()))) == vocab_sha256(VOCAB)


@pytest.mark.parametrize("token", sorted(VOCAB))
def test_the_hash_of_a_vocabulary_changes_with_every_id(token: str) -> None:
    assert vocab_sha256(VOCAB | {token: 9}) != vocab_sha256(VOCAB)


@pytest.mark.parametrize("other", [{**VOCAB, "c": 3}, {"a": 0, "b": 1}, {"a": 0, "B": 1, "<|im_end|>": 2}, {}])
def test_the_hash_of_a_vocabulary_changes_with_its_tokens(other: dict[str, int]) -> None:
    assert vocab_sha256(other) != vocab_sha256(VOCAB)


def test_tokens_that_are_no_text_have_a_hash() -> None:
    assert vocab_sha256({"\ud800": 0}) != vocab_sha256({"\udfff": 0})


def make_config(model: Path, **inference: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "output_dir": "unused",
            "model": {"path": model},
            "inference": {"engine": "vllm", **inference},
            "orchestrator": {"group_size": 6},
            "images": {"fit": False, "max_per_prompt": 3},
        }
    )


def test_a_run_needs_what_its_config_says(tiny_model: Path, info: ModelInfo) -> None:
    config = make_config(tiny_model, max_model_len=512, vllm={"data_parallel_size": 2})
    assert needs_of(config, info) == Needs(
        max_model_len=512,
        group_size=6,
        max_images=3,
        weight_transfer="safetensors_dir",
        data_parallel_size=2,
        is_fitted=False,
    )


def test_no_run_needs_more_positions_than_the_model_has(tiny_model: Path, info: ModelInfo) -> None:
    assert needs_of(make_config(tiny_model, max_model_len=1_000_000), info).max_model_len == 8192


@pytest.mark.parametrize(("weight_update", "backend"), [("reload_weights", None), ("nccl", "nccl")])
def test_each_way_to_update_weights_needs_its_backend(
    tiny_model: Path, info: ModelInfo, weight_update: str, backend: str | None
) -> None:
    assert needs_of(make_config(tiny_model, weight_update=weight_update), info).weight_transfer == backend
