"""What the plugin mends in vLLM's CPU build, on stand-ins of its classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from latepix_vllm.cpu_delta_net import attend, convolve, delta_rule, install
from latepix_vllm.cpu_families import repack_updated_experts, rotate_slices_natively

KEYS, VALUES, FEATURES, WIDTH = 2, 4, 8, 4
CHANNELS = (2 * KEYS + VALUES) * FEATURES


def hugging_face_rule(**tensors: torch.Tensor) -> Any:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    rule: Any = torch_chunk_gated_delta_rule
    return rule(**tensors, output_final_state=True, use_qk_l2norm_in_kernel=True)


@pytest.mark.filterwarnings("ignore")
def test_the_rule_equals_hugging_faces_and_continues_where_it_stopped() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (KEYS, FEATURES), "key": (KEYS, FEATURES), "value": (VALUES, FEATURES)}
    inputs = {name: torch.randn(3, 70, *shape, generator=generator) for name, shape in shapes.items()}
    decay = -torch.rand(3, 70, VALUES, generator=generator)
    beta = torch.rand(3, 70, VALUES, generator=generator)
    wanted, last = hugging_face_rule(**inputs, g=decay, beta=beta)
    states = torch.zeros(3, VALUES, FEATURES, FEATURES)
    pieces = []
    for part in (slice(0, 33), slice(33, 34), slice(34, 70)):
        columns = [inputs[name][:, part] for name in ("query", "key", "value")]
        found, states = delta_rule(*columns, decay[:, part], beta[:, part], states)
        pieces.append(found)
    # Chunks of 64 tokens there, single tokens here.
    torch.testing.assert_close(torch.cat(pieces, dim=1), wanted, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(states, last, atol=2e-6, rtol=1e-5)


def test_the_convolution_is_causal_and_continues_where_it_stopped() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2, 9, 6, generator=generator)
    weight, bias = torch.randn(6, 1, WIDTH, generator=generator), torch.randn(6, generator=generator)
    padded = F.pad(inputs.transpose(1, 2), (WIDTH - 1, 0))
    wanted = F.silu(F.conv1d(padded, weight, bias, groups=6)).transpose(1, 2)
    states = torch.zeros(2, 6, WIDTH - 1)
    pieces = []
    for part in (slice(0, 1), slice(1, 7), slice(7, 9)):
        found, states = convolve(inputs[:, part], states, weight, bias, "silu")
        pieces.append(found)
    torch.testing.assert_close(torch.cat(pieces, dim=1), wanted)


def make_layer(slots: int, *, dim_first: bool) -> Any:
    generator = torch.Generator().manual_seed(2)
    conv = torch.randn(slots, CHANNELS, WIDTH - 1, generator=generator)

    def split(mixed: torch.Tensor) -> list[torch.Tensor]:
        parts = mixed.split([KEYS * FEATURES, KEYS * FEATURES, VALUES * FEATURES], dim=-1)
        return [part.unflatten(-1, (-1, FEATURES))[None] for part in parts]

    return SimpleNamespace(
        kv_cache=[
            conv if dim_first else conv.transpose(1, 2).contiguous(),
            torch.randn(slots, VALUES, FEATURES, FEATURES, generator=generator),
        ],
        conv1d=SimpleNamespace(weight=torch.randn(CHANNELS, 1, WIDTH, generator=generator), bias=None),
        activation="silu",
        A_log=torch.randn(VALUES, generator=generator),
        dt_bias=torch.randn(VALUES, generator=generator),
        rearrange_mixed_qkv=split,
    )


def metadata(lengths: list[int], slots: list[int], *, decodes: int, has_state: list[bool]) -> Any:
    return SimpleNamespace(
        num_decodes=decodes,
        num_prefills=len(lengths) - decodes,
        non_spec_query_start_loc=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        non_spec_state_indices_tensor=torch.tensor(slots),
        has_initial_state=torch.tensor(has_state),
    )


@pytest.mark.parametrize("dim_first", [True, False])
def test_requests_of_one_step_do_not_see_each_other_and_prompts_may_come_in_pieces(dim_first: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randn(length, CHANNELS, generator=generator) for length in (7, 5))
    gates = torch.randn(2, 12, VALUES, generator=generator)
    alone = torch.zeros(12, VALUES, FEATURES)
    layer = make_layer(4, dim_first=dim_first)
    for part, slot in ((slice(0, 7), 3), (slice(7, 12), 1)):
        mixed = torch.cat([first, second])[part]
        about = metadata([len(mixed)], [slot], decodes=0, has_state=[False])
        attend(layer, about, mixed, *gates[:, part], alone[part], conv_is_dim_first=dim_first)
    # Again: the first 4 tokens of one; then its next (a decode) and all of the other; then its last two.
    other = make_layer(4, dim_first=dim_first)
    mixed, together = torch.cat([first, second]), torch.zeros_like(alone)
    for tokens, about in (
        ([0, 1, 2, 3], metadata([4], [3], decodes=0, has_state=[False])),
        ([4, 7, 8, 9, 10, 11], metadata([1, 5], [3, 1], decodes=1, has_state=[True, False])),
        ([5, 6], metadata([2], [3], decodes=0, has_state=[True])),
    ):
        output = torch.zeros(len(tokens), VALUES, FEATURES)
        attend(other, about, mixed[tokens], *gates[:, tokens], output, conv_is_dim_first=dim_first)
        together[tokens] = output
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)
    for one, two in zip(layer.kv_cache, other.kv_cache, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)


def test_only_float32_goes_another_way() -> None:
    calls: list[str] = []
    module = SimpleNamespace(
        LayerNameType=str,
        cpu_gdn_attention_core=lambda *args: calls.append("original"),
        get_forward_context=lambda: (
            calls.append("ours") or SimpleNamespace(no_compile_layers={"x": 0}, attn_metadata=None)
        ),
        _resolve_layer_name=lambda name: name,
    )
    install(module)
    core = module.cpu_gdn_attention_core
    install(module)
    assert module.cpu_gdn_attention_core is core
    for dtype in (torch.bfloat16, torch.float32):
        core(torch.zeros(1, dtype=dtype), *[torch.zeros(1)] * 3, "x")
    assert calls == ["original", "ours"]


def test_experts_are_repacked_when_they_are_updated_and_not_twice_at_first() -> None:
    packed: list[str] = []
    experts = SimpleNamespace(process_weights_after_loading=packed.append)

    class Method:
        moe_kernel: Any = None

        def _setup_kernel(self, layer: str) -> None:
            if self.moe_kernel is None:
                self.moe_kernel = SimpleNamespace(fused_experts=experts)
                experts.process_weights_after_loading(layer)

    repack_updated_experts(Method)
    repack_updated_experts(Method)
    method = Method()
    method._setup_kernel("first")
    method._setup_kernel("update")
    assert packed == ["first", "update"]


def test_slices_do_not_go_to_the_rotary_kernel() -> None:
    class Rotary:
        def forward_cpu(self, positions: Any, query: Any, key: Any = None) -> str:
            return "kernel"

        def forward_native(self, positions: Any, query: Any, key: Any = None) -> str:
            return "torch"

    rotate_slices_natively(Rotary)
    rotate_slices_natively(Rotary)
    rows, heads = torch.zeros(3, 8), torch.zeros(3, 2, 8)
    rotary = Rotary()
    assert rotary.forward_cpu(None, rows, rows) == rotary.forward_cpu(None, rows) == "kernel"
    assert rotary.forward_cpu(None, heads, rows) == rotary.forward_cpu(None, rows, heads) == "torch"
    assert rotary.forward_cpu(None, rows[:, :4], rows) == "torch"
