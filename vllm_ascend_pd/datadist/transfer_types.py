# SPDX-License-Identifier: Apache-2.0
"""Value types of `transfer_cache_async` and `remap_registered_memory` (datadist-api.md §3.2).

Plain data with the interface's argument checks; no thread, no state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum

from vllm_ascend_pd.datadist.status import check_integer, check_type, check_uint32, check_uint64, require
from vllm_ascend_pd.datadist.types import BlocksCacheKey, CacheKeyByIdAndIndex, check_layer_range


class Memtype(Enum):
    """Where a piece of registered memory lies."""

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class MemInfo:
    """One piece of registered memory."""

    def __init__(self, mem_type: Memtype, addr: int, size: int) -> None:
        check_type("mem_type", mem_type, Memtype, allow_none=False)
        check_type("addr", addr, int, allow_none=False)
        check_type("size", size, int, allow_none=False)
        self._mem_type = mem_type
        self._addr = addr
        self._size = size

    mem_type = property(lambda self: self._mem_type, doc="Host or device.")
    addr = property(lambda self: self._addr, doc="First byte.")
    size = property(lambda self: self._size, doc="Bytes.")


class LayerSynchronizer(ABC):
    """What the caller of `transfer_cache_async` implements: says when a layer may be sent."""

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Block until the layer is complete; False ends the job. The timeout is always None."""


class TransferConfig:
    """A destination by raw addresses; only for message mode, which the host implementation lacks."""

    def __init__(
        self,
        dst_cluster_id: int,
        dst_addrs: Sequence[int],
        src_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        check_uint64("dst_cluster_id", dst_cluster_id)
        check_type("dst_addrs", dst_addrs, (list, tuple), int, allow_none=False)
        for address in dst_addrs:
            check_uint64("dst_addrs", address)
        check_layer_range("src_layer_range", src_layer_range)
        check_uint32("src_batch_index", src_batch_index)
        self.dst_cluster_id = dst_cluster_id
        self.dst_addrs = dst_addrs
        self.src_layer_range = src_layer_range
        self.src_batch_index = src_batch_index
        self.dst_layer_range: range | None = None


class TransferWithCacheKeyConfig:
    """A destination by the peer's key; the i-th source layer goes to the i-th destination layer."""

    def __init__(
        self,
        cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_layer_range: range,
        dst_layer_range: range,
        src_batch_index: int = 0,
    ) -> None:
        check_type("cache_key", cache_key, (BlocksCacheKey, CacheKeyByIdAndIndex), allow_none=False)
        for name, layers in (("src_layer_range", src_layer_range), ("dst_layer_range", dst_layer_range)):
            check_type(name, layers, range, allow_none=False)
            check_layer_range(name, layers)
        require(
            len(src_layer_range) == len(dst_layer_range),
            f"src_layer_range {src_layer_range} and dst_layer_range {dst_layer_range} have unlike lengths",
        )
        check_integer("src_batch_index", src_batch_index, 0, 2**32 - 1, "uint32")
        if isinstance(cache_key, BlocksCacheKey):
            require(src_batch_index == 0, f"src_batch_index must be 0 with a BlocksCacheKey, not {src_batch_index}")
        self.cache_key = cache_key
        self.src_layer_range = src_layer_range
        self.dst_layer_range = dst_layer_range
        self.src_batch_index = src_batch_index
        self.dst_cluster_id = cache_key.cluster_id
