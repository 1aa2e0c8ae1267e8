"""What else vLLM's CPU build gets wrong, in silence, for some families.

* Experts: they are repacked for the CPU when they are loaded, but not when they are updated: the server goes on with
  the old ones and answers 200 (0.32, `unquantized_fused_moe_method.py`).
* Rotary embedding: the CPU kernel takes queries and keys as rows of [tokens, heads x features]. Kimi's latent attention
  hands in slices of [tokens, heads, features]; the kernel reads them as if they were packed.
"""

from __future__ import annotations

import functools
from typing import Any


def repack_updated_experts(method: Any) -> None:
    """Mend vLLM's `UnquantizedFusedMoEMethod`; any number of times."""
    setup = method._setup_kernel
    if getattr(setup, "_latepix_repacks", False):
        return

    @functools.wraps(setup)
    def setup_and_repack(self: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        is_update = self.moe_kernel is not None
        result = setup(self, layer, *args, **kwargs)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)
        return result

    setup_and_repack._latepix_repacks = True  # ty: ignore[missing-attribute]
    method._setup_kernel = setup_and_repack


def rotate_slices_natively(rotary: Any) -> None:
    """Mend vLLM's `RotaryEmbedding`: what its CPU kernel cannot read goes to plain torch; any number of times."""
    kernel = rotary.forward_cpu
    if getattr(kernel, "_latepix_checks", False):
        return

    @functools.wraps(kernel)
    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        is_packed = all(x is None or (x.dim() == 2 and x.is_contiguous()) for x in (query, key))
        return (kernel if is_packed else type(self).forward_native)(self, positions, query, key)

    forward_cpu._latepix_checks = True  # ty: ignore[missing-attribute]
    rotary.forward_cpu = forward_cpu
