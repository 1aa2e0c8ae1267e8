"""The plugin that is installed beside vLLM; it imports nothing of `latepix`, and nothing heavy before it is used.

Goes in: vLLM's own plugin calls (`VLLM_PLUGINS=latepix`). Comes out: the weight-transfer backend `safetensors_dir`, the
routes `GET /latepix/facts` and `POST /latepix/pixels`, and the two response fields that vLLM 0.28 and 0.29 lack.
"""

from __future__ import annotations

import multiprocessing

#: Name of the weight-transfer backend, as in `--weight-transfer-config '{"backend": "safetensors_dir"}'`.
BACKEND = "safetensors_dir"


def register() -> None:
    """Make the weight-transfer backend known to vLLM; called in each of its processes, any number of times."""
    from latepix_vllm import compat, cpu_delta_net, cpu_families, cpu_seeds

    factory = compat.weight_transfer_factory()
    # The factory has no public way to ask, and refuses a second registration of a name.
    if BACKEND not in factory._registry:
        factory.register_engine(BACKEND, "latepix_vllm.weights", "SafetensorsDirEngine")
    if compat.is_cpu() and multiprocessing.parent_process() is not None:
        # Models run in child processes; the server's own need not load what they need.
        cpu_seeds.install(compat.cpu_model_runner())
        for mend, place in (
            (cpu_delta_net.install, compat.cpu_delta_net()),
            (cpu_families.repack_updated_experts, compat.fused_moe_method()),
            (cpu_families.rotate_slices_natively, compat.rotary_embedding()),
        ):
            # Another version may not have what is mended; then the canary of every publish says whether it is needed.
            if place is not None:
                mend(place)
