# SPDX-License-Identifier: Apache-2.0
"""From vLLM's KV cache objects to our layout: cache groups for the scheduler half, regions for the worker half."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.plan.layout import CacheGroup, CacheLayout, Region, build_layout

ALIGNMENT = 2 << 20  # of every registered base; kv_memory.py and vllm-ascend allocate accordingly
MAX_REGIONS = 256  # that one process can register with HCCL, its staging buffer included

# vllm-ascend keeps the indexer's keys and their scale in one allocation.
SCALE_HINT = ". With enable_sparse_li_c8 the scale begins where the indexer's keys end: turn it off"

# Spec class name -> our kind. Class names, as the classes move between releases.
_KINDS = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "mla",
    "AscendMLAAttentionSpec": "mla",
    "SlidingWindowSpec": "sliding_window",
}
# What we know and cannot hand over, in words.
_REFUSED = {
    "MambaSpec": "the state of Mamba and GDN layers",
    "AscendSlidingWindowMLASpec": "the compressed caches of DeepSeek-V4",
    "SlidingWindowMLASpec": "the compressed caches of DeepSeek-V4",
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
        for each in specs:
            _refuse_spec(each, group.layer_names[0])
        first = specs[0]
        groups.append(
            CacheGroup(
                kind="+".join(sorted({_KINDS[type(each).__name__] for each in specs})),
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


def _refuse_spec(spec: Any, layer: str) -> None:
    name = type(spec).__name__
    why = ""
    if name not in _KINDS:
        why = _REFUSED.get(name, "a kind of cache that it does not know")
    elif (ratio := int(getattr(spec, "compress_ratio", 1) or 1)) > 1:
        why = f"{_REFUSED['AscendSlidingWindowMLASpec']} (compress_ratio {ratio})"
    elif (copies := int(getattr(spec, "sfa_dcp_replicated_indexer_size", 1) or 1)) > 1:
        why = f"an indexer cache that is kept {copies} times for decode context parallelism"
    if why:
        raise PDConfigError(
            f"--pd-role: cache kind {name} (layers {layer} …) cannot be handed over by this release: {why} "
            f"(it can: {', '.join(sorted(_KINDS))})"
        )


def refuse_nz(vllm_config: Any) -> None:
    """vllm-ascend's `enable_kv_nz` keeps the decode side's MLA cache in the NZ format.

    Its shape does not tell, the prefill side writes ND, and a pull moves bytes as they are.

    Raises:
        PDConfigError: it is on.
    """
    additional = getattr(vllm_config, "additional_config", None) or {}
    if isinstance(additional, Mapping) and additional.get("enable_kv_nz"):
        raise PDConfigError(
            "--additional-config: enable_kv_nz is true, with --pd-role it has to be false: it keeps the MLA cache of "
            "the decode side in the NZ format while prefill sides write ND, and this release does not convert"
        )


def describe_caches(kv_caches: Mapping[str, Any], num_blocks: int, groups: Sequence[CacheGroup]) -> CacheLayout:
    """Where each part of each layer lies, from the tensors that the model runner made.

    Raises:
        PDConfigError: a layout that cannot be handed over.
    """
    parts = {
        layer: tuple(_region(layer, index, part, num_blocks) for index, part in enumerate(split(cache, num_blocks)))
        for layer, cache in kv_caches.items()
    }
    try:
        return build_layout(parts, [group.layers for group in groups])
    except ValueError as error:
        raise PDConfigError(f"--pd-role: {error}") from error


def split(cache: Any, num_blocks: int) -> tuple[Any, ...]:
    """The parts of one layer's cache, each with its blocks outermost.

    A tuple or list is the parts (vllm-ascend: K and V; nope and rope; an indexer's). One tensor is one part where its
    blocks are outermost (vLLM on CPU), or as many as its outermost extent where that is before the blocks
    (backends of 0.23.0 for other devices: `[2, num_blocks, …]`).
    """
    parts: list[Any] = []
    for tensor in split_tuple(cache):
        if tensor.shape[0] % num_blocks and tensor.dim() > 1 and tensor.shape[1] % num_blocks == 0:
            parts += tensor
        else:
            parts.append(tensor)
    return tuple(parts)


def split_tuple(cache: Any) -> tuple[Any, ...]:
    """The tensors of one layer's cache, as the model runner made them."""
    return tuple(cache) if isinstance(cache, tuple | list) else (cache,)


def _region(layer: str, index: int, part: Any, num_blocks: int) -> Region:
    """One part's memory.

    The kernels' blocks may be smaller than the scheduler's: then block `b` is the rows `[b * scale, (b + 1) * scale)`
    of the tensor, which follow one another, so a region of larger blocks is all it takes and no ids are expanded.
    """
    name = f"part {index} of {layer}"
    if part.shape[0] % num_blocks:
        raise PDConfigError(
            f"--pd-role: KV cache: {name} has shape {tuple(part.shape)}; blocks ({num_blocks}) are not outermost"
        )
    scale = part.shape[0] // num_blocks
    inner = part[0].numel() * part.element_size()
    stride = part.stride(0) * part.element_size()
    if inner != stride or not part[0].is_contiguous():
        raise PDConfigError(
            f"--pd-role: KV cache: blocks of {name} are {inner} bytes at a stride of {stride} (strides "
            f"{tuple(part.stride())}): views into pages shared by several caches, as those of DeepSeek-V4, cannot be "
            "handed over by this release"
        )
    return Region(int(part.data_ptr()), num_blocks, stride * scale, str(part.dtype).removeprefix("torch."))


def find_device(kv_caches: Mapping[str, Any]) -> Any:
    """The torch device that all caches are on.

    Raises:
        PDConfigError: there are several, or no caches at all.
    """
    devices = {part.device for cache in kv_caches.values() for part in split_tuple(cache)}
    if len(devices) != 1:
        raise PDConfigError(f"--pd-role: the KV caches are on {', '.join(sorted(map(str, devices))) or 'no device'}")
    return devices.pop()


def check_regions(layout: CacheLayout, groups: Sequence[CacheGroup], *, is_device: bool) -> None:
    """What the data plane asks of every region, with the layer's name: the data plane itself knows addresses only.

    Raises:
        PDConfigError: a base that is not aligned, or more regions than a device's process can register.
    """
    for group in groups:
        for layer in group.layers:
            parts = layout.slots_of_layer[layer]
            for index, (model_id, tensor) in enumerate(parts):
                address = layout.caches[model_id][tensor].address
                if address % ALIGNMENT:
                    raise PDConfigError(
                        f"--pd-role: KV cache: part {index} of {layer} begins at {address:#x}, which is "
                        f"{address % ALIGNMENT} bytes after a 2 MiB boundary; the data plane takes aligned bases only"
                        + (SCALE_HINT if len(parts) > 2 and index == len(parts) - 1 else "")
                    )
    num_regions = layout.num_regions() + 1  # and the staging buffer
    if is_device and num_regions > MAX_REGIONS:
        layers = sum(len(group.layers) for group in groups)
        raise PDConfigError(
            f"--pd-role: {num_regions} memory regions are needed ({layers} layers, {num_regions - 1} distinct tensors, "
            f"one staging buffer), a process can register {MAX_REGIONS}: each tensor is an allocation of its own, so "
            "none can be registered together; this model needs fewer layers in each process"
        )
