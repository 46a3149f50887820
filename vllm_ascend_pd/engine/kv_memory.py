# SPDX-License-Identifier: Apache-2.0
"""KV cache memory: on CPU one shared arena per rank, every registered base on a 2 MiB boundary; on an NPU what has to
stay free beside the caches, which vllm-ascend allocates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from vllm_ascend_pd.config import EXTRA_CONFIG_KEY, PDConfig
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.memory.arena import Arena

logger = logging.getLogger(__name__)

ALIGNMENT = 2 << 20

# The arena of the allocation under way: 0.23.0 allocates tensor by tensor, in one loop over one config.
_current: tuple[Any, Arena, int] | None = None


def has_pd_role(vllm_config: Any) -> bool:
    """Whether this engine's KV transfer config is ours (alone or inside a MultiConnector)."""
    return _find_settings(vllm_config) is not None


def _find_settings(vllm_config: Any) -> dict[str, Any] | None:
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is None:
        return None
    extra = transfer.kv_connector_extra_config or {}
    nested = [c.get("kv_connector_extra_config") or {} for c in extra.get("connectors", ())]
    found: list[dict[str, Any]] = [c[EXTRA_CONFIG_KEY] for c in (extra, *nested) if EXTRA_CONFIG_KEY in c]
    return found[0] if found else None


def keep_device_bytes(vllm_config: Any, available: Sequence[int], module: Any = None) -> list[int]:
    """What is left of each rank's memory for KV caches, before their size is decided. Unchanged on CPU and without PD.

    Raises:
        PDConfigError: nothing is left.
    """
    settings = _find_settings(vllm_config)
    if settings is None or str(vllm_config.device_config.device_type) != "npu":
        return list(available)
    from vllm_ascend_pd.transfer.staging.reserve import reserved_device_bytes  # engines without PD come by here, too

    reserved = reserved_device_bytes(
        PDConfig.from_dict(settings), num_tensors=_count_tensors(vllm_config), module=module
    )
    if vllm_config.cache_config.kv_cache_memory_bytes:
        logger.warning(
            "pd: --kv-cache-memory-bytes is given and taken as it is; staging and links need %d MiB beside it",
            reserved >> 20,
        )
        return list(available)
    if min(available, default=0) <= reserved:
        raise PDConfigError(
            f"--pd-role: {min(available) >> 20} MiB of device memory are left for KV caches, of which staging and "
            f"links take {reserved >> 20} MiB: raise --gpu-memory-utilization, or give --pd-transfer straight"
        )
    logger.info("pd: %d MiB of each device are kept for staging and links", reserved >> 20)
    return [num_bytes - reserved for num_bytes in available]


def _count_tensors(vllm_config: Any) -> int:
    """K and V, or nope and rope; sparse attention has an indexer's, too."""
    model = vllm_config.model_config
    per_layer = 3 if hasattr(model.hf_text_config, "index_topk") else 2
    return per_layer * int(model.get_num_layers(vllm_config.parallel_config))


def aligned_num_blocks(vllm_config: Any, kv_cache_groups: Sequence[Any], num_blocks: int) -> int:
    """Round down so that `num_blocks * block_bytes` is a multiple of 2 MiB for every layer of every group."""
    from vllm.platforms import current_platform

    if not has_pd_role(vllm_config) or not current_platform.is_cpu():
        return num_blocks
    step = 1
    for group in kv_cache_groups:
        spec = group.kv_cache_spec
        for layer_spec in (getattr(spec, "kv_cache_specs", None) or {"": spec}).values():
            block_bytes = int(layer_spec.page_size_bytes)
            step = math.lcm(step, ALIGNMENT // math.gcd(ALIGNMENT, block_bytes))
    if num_blocks < step:
        raise PDConfigError(
            f"--pd-role: KV cache memory for {num_blocks} blocks, but {step} are needed so that every layer starts "
            "on a 2 MiB boundary; raise --kv-cache-memory-bytes (or --gpu-memory-utilization)"
        )
    rounded = num_blocks // step * step
    if rounded != num_blocks:
        _check_longest_prompt_fits(vllm_config, kv_cache_groups, rounded, num_blocks)
        logger.info("pd: %d KV cache blocks instead of %d (2 MiB alignment)", rounded, num_blocks)
    return rounded


def _check_longest_prompt_fits(vllm_config: Any, kv_cache_groups: Sequence[Any], rounded: int, num_blocks: int) -> None:
    """Upstream has checked `num_blocks`; a request that the rounded pool cannot hold would wait for ever."""
    specs = [group.kv_cache_spec for group in kv_cache_groups]
    needed = sum(-(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes) for spec in specs)
    if rounded - 1 < needed:  # one is the null block
        raise PDConfigError(
            f"--pd-role: a request of --max-model-len {vllm_config.model_config.max_model_len} needs {needed} KV cache "
            f"blocks, and of {num_blocks} only {rounded} are left by alignment to 2 MiB: raise --kv-cache-memory-bytes "
            "or lower --max-model-len"
        )


def allocator(kv_cache_config: Any) -> Callable[..., Any]:
    """A function with the call shape of `torch.zeros(num_bytes, dtype=torch.int8, device=…)`."""
    import torch

    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm_ascend_pd.engine.hooks import pd_connector

    def zeros(num_bytes: int, *, dtype: Any, device: Any) -> Any:
        on_cpu = torch.device(device).type == "cpu"
        if not on_cpu or not has_kv_transfer_group() or pd_connector(get_kv_transfer_group()) is None:
            return torch.zeros(num_bytes, dtype=dtype, device=device)
        return _take(kv_cache_config, num_bytes)

    return zeros


def _take(kv_cache_config: Any, num_bytes: int) -> Any:
    global _current
    if _current is None or _current[0] is not kv_cache_config:
        tensors = kv_cache_config.kv_cache_tensors
        shared = any(hasattr(tensor, "layers") for tensor in tensors)  # 0.32.0: one backing for all
        total = num_bytes if shared else sum(_align(tensor.size) for tensor in tensors)
        arena = Arena.create(total, "kv-cache")
        logger.info(
            "pd: KV cache arena of %.1f MiB at %#x, huge pages: %s",
            total / 2**20,
            arena.address,
            arena.huge_pages,
        )
        _current = (kv_cache_config, arena, 0)
    config, arena, used = _current
    if used + num_bytes > arena.num_bytes:
        raise PDConfigError(
            f"--pd-role: a KV cache tensor of {num_bytes} bytes was asked for where {arena.num_bytes - used} are left: "
            "this release of vLLM allocates KV caches in a way that this release does not know"
        )
    _current = (config, arena, used + _align(num_bytes))
    return arena.as_tensor()[used : used + num_bytes]


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
