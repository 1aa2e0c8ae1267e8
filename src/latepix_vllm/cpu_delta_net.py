"""The gated delta net of Qwen3.5 in float32 on a CPU, in plain torch: vLLM's own kernel takes bfloat16 only.

A layer keeps two states for each request: the last inputs of a short causal convolution, and a matrix S per head that
every token fades, reads and corrects (Gated Delta Networks, arXiv:2412.06464, eq. 10). Per head, with q and k of length
1 and q scaled by 1 / sqrt(K):

    S <- exp(g) S        S <- S + k (beta (v - k^T S))^T        output = q^T S
    g = -exp(A_log) softplus(a + dt_bias)                       beta = sigmoid(b)

For tiny models: it goes through the tokens of a prompt one by one.

Letters: T tokens of a step, N requests of one length L, C channels of the convolution, W its width, H value heads,
K and V features of a key and of a value.
"""

# No `from __future__ import annotations`: torch reads the signature of the operator below at run time.
import itertools
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F


def install(module: Any) -> None:
    """Let vLLM's CPU operator take float32; any number of times, and before its first layer is built.

    Args:
        module: `vllm.model_executor.layers.mamba.ops.cpu.gdn_attention`.
    """
    original = module.cpu_gdn_attention_core
    if getattr(original, "_latepix_float32", False):
        return

    def cpu_gdn_attention_core(
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        layer_name: module.LayerNameType,
    ) -> None:
        if mixed_qkv.dtype != torch.float32:
            return original(mixed_qkv, b, a, core_attn_out, layer_name)
        context = module.get_forward_context()
        layer = context.no_compile_layers[module._resolve_layer_name(layer_name)]
        # None in the run that measures memory.
        if context.attn_metadata is not None:
            metadata = context.attn_metadata[layer.prefix]
            attend(layer, metadata, mixed_qkv, a, b, core_attn_out, conv_is_dim_first=module.is_conv_state_dim_first())
        return None

    cpu_gdn_attention_core._latepix_float32 = True  # ty: ignore[missing-attribute]
    module.cpu_gdn_attention_core = cpu_gdn_attention_core


def attend(
    layer: Any,
    metadata: Any,
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    output: torch.Tensor,
    *,
    conv_is_dim_first: bool,
) -> None:
    """Compute one layer for the requests of a step, and move their states on.

    Args:
        layer: vLLM's; its `kv_cache` holds the states of all slots.
        metadata: vLLM's: requests that decode come first, then those that prefill.
        mixed: [T, C] queries, keys and values before the convolution.
        a, b: [T, H] inputs of the gates.
        output: [T, H, V], filled in place.
        conv_is_dim_first: whether the convolution's states are [slots, C, W - 1], or [slots, W - 1, C].
    """
    conv_states, delta_states = layer.kv_cache[0], layer.kv_cache[1]
    if not conv_is_dim_first:
        conv_states = conv_states.transpose(1, 2)
    num_requests = metadata.num_decodes + metadata.num_prefills
    if not num_requests:
        return
    starts = metadata.non_spec_query_start_loc[: num_requests + 1].tolist()
    slots = metadata.non_spec_state_indices_tensor[:num_requests].long()
    is_new = torch.zeros(num_requests, dtype=torch.bool)
    if metadata.num_prefills:
        is_new[metadata.num_decodes :] = ~metadata.has_initial_state[metadata.num_decodes : num_requests].cpu()
    by_length: dict[int, list[int]] = defaultdict(list)
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        by_length[end - start].append(request)
    by_length.pop(0, None)
    for length, requests in by_length.items():
        tokens = torch.tensor([starts[request] for request in requests])[:, None] + torch.arange(length)
        chosen = slots[requests]
        fresh = is_new[requests]
        conv, delta = conv_states[chosen], delta_states[chosen].float()
        conv[fresh], delta[fresh] = 0, 0
        values, conv = convolve(mixed[tokens], conv, layer.conv1d.weight, layer.conv1d.bias, layer.activation)
        # The layer splits channels of single tokens.
        query, key, value = (x[0].unflatten(0, tokens.shape) for x in layer.rearrange_mixed_qkv(values.flatten(0, 1)))
        log_decay = -layer.A_log.float().exp() * F.softplus(a[tokens].float() + layer.dt_bias.float())
        found, delta = delta_rule(query, key, value, log_decay, b[tokens].float().sigmoid(), delta)
        output[tokens.flatten()] = found.flatten(0, 1).to(output.dtype)
        conv_states[chosen], delta_states[chosen] = conv, delta.to(delta_states.dtype)


def convolve(
    inputs: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the causal convolution.

    Args:
        inputs: [N, L, C].
        states: [N, C, W - 1] inputs that came before.
        weight: [C, 1, W].
        bias: [C] or None.
        activation: `silu` or `swish`, or anything else for none.
    Returns:
        [N, L, C] outputs and [N, C, W - 1] new states.
    """
    channels, width = weight.shape[0], weight.shape[-1]
    padded = torch.cat([states.to(inputs.dtype), inputs.transpose(1, 2)], dim=-1)
    outputs = F.conv1d(padded, weight.reshape(channels, 1, width), bias, groups=channels)
    if activation in ("silu", "swish"):
        outputs = F.silu(outputs)
    return outputs.transpose(1, 2), padded[..., -(width - 1) :].to(states.dtype)


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Go through the tokens of N requests, one after the other.

    Args:
        query, key: [N, L, H_k, K], where H_k divides H.
        value: [N, L, H, V].
        log_decay, beta: [N, L, H].
        states: [N, H, K, V] float32.
    Returns:
        [N, L, H, V] outputs and [N, H, K, V] new states, float32.
    """
    repeats = value.shape[2] // key.shape[2]
    query, key = (_normalized(x.float()).repeat_interleave(repeats, dim=2) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    outputs = torch.empty_like(value, dtype=torch.float32)
    for token in range(value.shape[1]):
        states = states * log_decay[:, token].exp()[..., None, None]
        k, v = key[:, token], value[:, token].float()
        error = beta[:, token][..., None] * (v - torch.einsum("nhk,nhkv->nhv", k, states))
        states = states + k[..., None] * error[..., None, :]
        outputs[:, token] = torch.einsum("nhk,nhkv->nhv", query[:, token], states)
    return outputs, states


def _normalized(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(dim=-1, keepdim=True) + 1e-6)
