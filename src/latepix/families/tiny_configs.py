"""Configurations of the tiny models: the real Hugging Face classes, at sizes that Hugging Face and vLLM both run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from latepix.transport.files import write_bytes

_MERGE = 2
_HALF = [0.5, 0.5, 0.5]
#: Pixels of a patch's side.
_PATCH = {"qwen2_5_vl": 14, "kimi_k25": 14}
_KIMI_MAX_PATCHES, _KIMI_MAX_SIDE = 4096, 512


class TinySize(msgspec.Struct, frozen=True):
    """Shape of a tiny model; the defaults learn handwritten digits in a CPU minute.

    Attributes:
        hidden, layers, heads, kv_heads, head_dim, intermediate: of the text model.
        vision_hidden, vision_depth, vision_heads, vision_intermediate: of the vision tower.
        vocab_tokens: BPE tokens, specials not counted.
        max_pixels: largest picture, width x height.
        max_positions: longest sequence, tokens.
    """

    hidden: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 192
    vision_hidden: int = 64
    vision_depth: int = 2
    vision_heads: int = 4
    vision_intermediate: int = 128
    vocab_tokens: int = 360
    max_pixels: int = 1024 * 1024
    max_positions: int = 8192


def patch_size(family: str) -> int:
    """Return the pixels of a patch's side."""
    return _PATCH.get(family, 16)


def tiny_config(family: str, size: TinySize, ids: Mapping[str, int]) -> Any:
    """Return Hugging Face's config of a tiny model.

    Args:
        family: `model_type`.
        size: shape of the model.
        ids: of the tokenizer's added tokens.
    """
    from transformers import AutoConfig

    vocab_size = -(-(max(ids.values()) + 1) // 16) * 16
    if family == "kimi_k25":
        return AutoConfig.for_model(family, **_kimi(size, ids, vocab_size))
    tied = family in ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
    return AutoConfig.for_model(
        family,
        text_config=_qwen_text(family, size, ids, vocab_size) | {"tie_word_embeddings": tied},
        vision_config=_qwen_vision(family, size),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tied,
    )


def _qwen_text(family: str, size: TinySize, ids: Mapping[str, int], vocab_size: int) -> dict[str, Any]:
    third = size.head_dim // 6
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [size.head_dim // 2 - 2 * third, third, third],
    }
    text: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": size.max_positions,
        "rope_parameters": rope,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    if family == "qwen2_5_vl":
        # This family has no head_dim of its own: it is hidden_size over the number of heads.
        del text["head_dim"]
        text |= {"num_attention_heads": size.hidden // size.head_dim, "num_key_value_heads": 1}
    else:
        rope["mrope_interleaved"] = True
    if family.endswith("_moe"):
        # vLLM's kernel wants multiples of 32; a size at which a matrix is square could be loaded transposed.
        expert = 32 * (size.hidden // 48)
        text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": expert}
    if family == "qwen3_vl_moe":
        text |= {"decoder_sparse_step": 1, "norm_topk_prob": True}
    if family == "qwen3_5_moe":
        text["shared_expert_intermediate_size"] = 32
    if family.startswith("qwen3_5"):
        # vLLM's CPU kernels take equal head sizes of 64 or 128.
        text |= {
            "num_hidden_layers": 2 * size.layers,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention"] * (2 * size.layers - 1) + ["full_attention"],
        }
        sixth = size.head_dim // 16
        rope |= {"partial_rotary_factor": 0.5, "mrope_section": [size.head_dim // 4 - 2 * sixth, sixth, sixth]}
    return text


def _qwen_vision(family: str, size: TinySize) -> dict[str, Any]:
    vision: dict[str, Any] = {
        "depth": size.vision_depth,
        "hidden_size": size.vision_hidden,
        "intermediate_size": size.vision_intermediate,
        "num_heads": size.vision_heads,
        "patch_size": patch_size(family),
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": size.hidden,
    }
    if family == "qwen2_5_vl":
        return vision | {
            "window_size": 2 * _MERGE * patch_size(family),
            "fullatt_block_indexes": [size.vision_depth - 1],
        }
    vision["num_position_embeddings"] = 64
    if family.startswith("qwen3_vl"):
        vision["deepstack_visual_indexes"] = [0]
    return vision


def _kimi(size: TinySize, ids: Mapping[str, int], vocab_size: int) -> dict[str, Any]:
    text = {
        "model_type": "deepseek_v3",
        "vocab_size": vocab_size,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "moe_intermediate_size": 32,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        # vLLM's kernel for this attention takes these two sizes only.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 48,
        "qk_nope_head_dim": size.head_dim,
        "v_head_dim": size.head_dim,
        "max_position_embeddings": size.max_positions,
        "routed_scaling_factor": 2.0,
        "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "bos_token_id": ids["[BOS]"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["[PAD]"],
        "tie_word_embeddings": False,
    }
    vision = {
        "hidden_size": size.vision_hidden,
        "intermediate_size": size.vision_intermediate,
        "num_attention_heads": size.vision_heads,
        "num_hidden_layers": size.vision_depth,
        "patch_size": patch_size("kimi_k25"),
        "pos_emb_height": 8,
        "pos_emb_width": 8,
    }
    return {
        "text_config": text,
        "vision_config": vision,
        "projection_hidden_size": size.vision_hidden,
        "image_token_id": ids["<|media_pad|>"],
        "video_token_id": ids["<|kimi_k25_video_placeholder|>"],
        "vision_start_token_id": ids["<|media_begin|>"],
        "vision_end_token_id": ids["<|media_end|>"],
        "tie_word_embeddings": False,
    }


def complete_config(family: str, out: Path) -> None:
    """Write into config.json what vLLM reads and Hugging Face's class does not write."""
    if family != "kimi_k25":
        return
    config = json.loads((out / "config.json").read_bytes())
    # Hugging Face's own spelling of the class would make vLLM take another backend, which knows no pictures.
    config["architectures"] = ["KimiK25ForConditionalGeneration"]
    config["use_unified_vision_chunk"] = True
    config["text_config"] |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    _write_json(out / "config.json", config)


def write_processor(family: str, out: Path, size: TinySize) -> None:
    """Write the settings that `AutoImageProcessor`, `AutoProcessor` (with torchvision) and vLLM read."""
    patch = patch_size(family)
    if family == "kimi_k25":
        _write_kimi_processor(out, patch)
        return
    name = "Qwen2_5_VLProcessor" if family == "qwen2_5_vl" else "Qwen3VLProcessor"
    shared = {
        "patch_size": patch,
        "merge_size": _MERGE,
        "temporal_patch_size": 2,
        "image_mean": _HALF,
        "image_std": _HALF,
        "size": {"shortest_edge": (patch * _MERGE) ** 2, "longest_edge": size.max_pixels},
        "processor_class": name,
    }
    video = "Qwen2VLVideoProcessor" if family == "qwen2_5_vl" else "Qwen3VLVideoProcessor"
    files = {
        "preprocessor_config.json": {**shared, "image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {**shared, "video_processor_type": video},
    }
    for file, settings in files.items():
        _write_json(out / file, settings)


def _write_kimi_processor(out: Path, patch: int) -> None:
    # The hub's names, which vLLM's processor reads; in processor_config.json beside Hugging Face's.
    media = {
        "in_patch_limit": _KIMI_MAX_PATCHES,
        "patch_size": patch,
        "image_mean": _HALF,
        "image_std": _HALF,
        "merge_kernel_size": _MERGE,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": _KIMI_MAX_SIDE,
        "in_patch_limit_each_frame": _KIMI_MAX_PATCHES,
        "in_patch_limit_video": None,
        "sample_fps": 2.0,
        "max_num_frames_each_video": None,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
        "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
    }
    image = {
        "image_processor_type": "Kimi_K25ImageProcessor",
        "patch_size": patch,
        "merge_size": _MERGE,
        "max_patches": _KIMI_MAX_PATCHES,
        "size": {"max_height": _KIMI_MAX_SIDE, "max_width": _KIMI_MAX_SIDE},
        "image_mean": _HALF,
        "image_std": _HALF,
        "media_proc_cfg": media,
    }
    video = {"video_processor_type": "Kimi_K25VideoProcessor"}
    processor = {"image_processor": image, "video_processor": video, "processor_class": "Kimi_K25Processor"}
    _write_json(out / "processor_config.json", processor)
    _write_json(out / "preprocessor_config.json", {"media_proc_cfg": media})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())
