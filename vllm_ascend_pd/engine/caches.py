# SPDX-License-Identifier: Apache-2.0
"""From vLLM's KV cache objects to our layout: cache groups for the scheduler half, regions for the worker half."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.plan.layout import CacheGroup, CacheLayout, Region, build_layout

# Spec class name -> our kind. Class names, as the classes move between releases.
_KINDS = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "mla",
    "SlidingWindowSpec": "sliding_window",
}


def describe_groups(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """The cache groups of a `KVCacheConfig`, in scheduler order.

    Raises:
        PDConfigError: a kind of cache that this release cannot hand over, named with its layers.
    """
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        nested = getattr(spec, "kv_cache_specs", None)
        specs = list(nested.values()) if nested else [spec]
        kinds = {type(s).__name__ for s in specs}
        unknown = kinds - _KINDS.keys()
        if unknown:
            raise PDConfigError(
                f"--pd-role: cache kind {', '.join(sorted(unknown))} (layers {group.layer_names[0]} …) cannot be "
                f"handed over by this release (it can: {', '.join(sorted(_KINDS))})"
            )
        first = specs[0]
        groups.append(
            CacheGroup(
                kind="+".join(sorted(_KINDS[k] for k in kinds)),
                block_size=int(spec.block_size),
                layers=tuple(group.layer_names),
                num_kv_heads=int(getattr(first, "num_kv_heads", 1)),
                head_size=int(getattr(first, "head_size", 0)),
                dtype=str(getattr(first, "dtype", "")).removeprefix("torch."),
                block_bytes=sum(int(s.page_size_bytes) for s in specs) // len(specs),
                window=int(getattr(first, "sliding_window", 0) or 0),
            )
        )
    return tuple(groups)


def describe_regions(kv_caches: Mapping[str, Any], num_blocks: int) -> CacheLayout:
    """Where each layer's blocks lie, from the tensors that the model runner made.

    A layer is one region when its tensor has blocks as the outermost dimension (vLLM 0.32.0 on CPU), or two when
    K and V are outermost (0.23.0 on CPU: shape [2, num_blocks, …]).

    Raises:
        PDConfigError: a layout in which a block's bytes are not contiguous.
    """
    regions: dict[str, Region] = {}
    for layer, tensor in kv_caches.items():
        tensors = tensor if isinstance(tensor, tuple | list) else (tensor,)
        for index, part in enumerate(tensors):
            if part.shape[0] % num_blocks and part.dim() > 1 and part.shape[1] % num_blocks == 0:
                for plane in range(part.shape[0]):
                    regions[_name(layer, index, plane)] = _region(layer, part[plane], num_blocks)
            else:
                regions[_name(layer, index, 0)] = _region(layer, part, num_blocks)
    return build_layout(regions)


def _name(layer: str, index: int, plane: int) -> str:
    return layer if index == plane == 0 else f"{layer}#{index}.{plane}"


def region_layers(layout: CacheLayout, layers: tuple[str, ...]) -> tuple[str, ...]:
    """The region names of a group's layers: each layer's own, and its further planes."""
    return tuple(
        name for layer in layers for name in layout.slot_of_layer if name == layer or name.startswith(f"{layer}#")
    )


def _region(layer: str, tensor: Any, num_blocks: int) -> Region:
    if tensor.shape[0] % num_blocks:
        raise PDConfigError(
            f"--pd-role: KV cache of {layer} has shape {tuple(tensor.shape)}; blocks ({num_blocks}) are not outermost"
        )
    kernel_blocks = tensor.shape[0] // num_blocks
    item = tensor.element_size()
    inner = tensor[0].numel() * item
    stride = tensor.stride(0) * item
    if inner != stride:
        raise PDConfigError(
            f"--pd-role: blocks of {layer} are {inner} bytes at a stride of {stride}: interleaved layouts cannot be "
            "handed over by this release"
        )
    return Region(int(tensor.data_ptr()), num_blocks, stride * kernel_blocks)
