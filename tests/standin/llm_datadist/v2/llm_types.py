# SPDX-License-Identifier: Apache-2.0
"""Descriptors, keys, transfer settings (datadist-api.md §3.2, §4.6)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from enum import Enum

from llm_datadist import data_type
from llm_datadist._release import BaseEnum
from llm_datadist.data_type import DataType
from llm_datadist.status import raise_if_false, raise_if_true
from llm_datadist.utils.utils import (
    check_int32,
    check_int64,
    check_isinstance,
    check_list_int64,
    check_list_uint64,
    check_uint32,
    check_uint64,
)

INVALID_ID = 2**64 - 1
Placement = BaseEnum("Placement", {"HOST": 0, "DEVICE": 1}, module=__name__)


class RegisterMemStatus(Enum):
    OK = 0
    PREPARING = 1
    FAILED = 2


int_to_mem_status_dict = {status.value: status for status in RegisterMemStatus}


class Memtype(Enum):
    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class PushType(Enum):
    NO_CACHE_KEY = 0
    BLOCKS_CACHE_KEY = 1
    CACHE_KEY_BY_ID = 2


class MemInfo:
    """A piece of memory to map again."""

    def __init__(self, mem_type, addr, size):
        check_isinstance("mem_type", mem_type, Memtype, allow_none=False)
        check_isinstance("addr", addr, int, allow_none=False)
        check_isinstance("size", size, int, allow_none=False)
        self._given = (mem_type, addr, size)

    mem_type = property(lambda self: self._given[0])
    addr = property(lambda self: self._given[1])
    size = property(lambda self: self._given[2])


class CacheDesc:
    """Tensors of one shape. The real one is marked by `register_blocks_cache`, and stays so; this one is not."""

    def __init__(
        self,
        num_tensors,
        shape,
        data_type,
        placement=Placement.DEVICE,
        batch_dim_index=0,
        seq_len_dim_index=-1,
        kv_tensor_format=None,
    ):
        check_uint32("num_tensors", num_tensors)
        check_isinstance("shape", shape, (list, tuple), int, allow_none=False)
        check_list_int64("shape", shape)
        check_isinstance("data_type", data_type, DataType, allow_none=False)
        check_isinstance("placement", placement, Placement, allow_none=False)
        check_int32("batch_dim_index", batch_dim_index)
        check_int32("seq_len_dim_index", seq_len_dim_index)
        raise_if_false(0 <= batch_dim_index < len(shape), "batch_dim_index is outside the shape")
        raise_if_false(-1 <= seq_len_dim_index < len(shape), "seq_len_dim_index is outside the shape")
        self._num_tensors = num_tensors
        self._shape = shape
        self._type = data_type
        self._placement = placement
        self._dims = (batch_dim_index, seq_len_dim_index)
        self._batch_size = shape[batch_dim_index]
        self._format = kv_tensor_format
        self._size = None

    num_tensors = property(lambda self: self._num_tensors)
    shape = property(lambda self: self._shape)
    data_type = property(lambda self: self._type)
    placement = property(lambda self: self._placement)
    batch_dim = property(lambda self: self._dims[0])
    batch_size = property(lambda self: self._batch_size)
    seq_len_dim_index = property(lambda self: self._dims[1])
    kv_tensor_format = property(lambda self: self._format)

    @property
    def size(self):
        if self._size is None:
            raise_if_false(all(extent > 0 for extent in self._shape), "the shape has no size")
            self._size = math.prod(self._shape) * data_type._BYTES[self._type]
        return self._size

    def update_dim(self, index, value):
        self._shape[index] = value
        self._size = None


class _Key:
    _names: tuple = ()
    _num_required = 1

    def _bind(self, args, kwargs):
        kind = type(self).__name__
        raise_if_true(len(args) + len(kwargs) > len(self._names), f"{kind} has too many parameters")
        found = dict(zip(self._names, args, strict=False))
        for name, value in kwargs.items():
            name = "cluster_id" if name == "prompt_cluster_id" else name
            raise_if_false(name in self._names and name not in found, f"{kind}: {name} is unknown or given twice")
            found[name] = value
        for name in self._names[: self._num_required]:
            raise_if_false(name in found, f"{kind}: {name} is missing")
        return found

    @property
    def prompt_cluster_id(self):
        return self.cluster_id


class CacheKey(_Key):
    """A slot by request or prefix."""

    _names = ("cluster_id", "req_id", "model_id", "prefix_id")
    _num_required = 2

    def __init__(self, *args, **kwargs):
        found = {"model_id": 0, "prefix_id": INVALID_ID, **self._bind(args, kwargs)}
        for name in self._names:
            check_uint64(name, found[name])
            setattr(self, f"_{name}", found[name])

    cluster_id = property(lambda self: self._cluster_id)
    req_id = property(lambda self: self._req_id)
    model_id = property(lambda self: self._model_id)
    prefix_id = property(lambda self: self._prefix_id)


class CacheKeyByIdAndIndex(_Key):
    """A slot by cache id."""

    def __init__(self, cluster_id, cache_id, batch_index=0):
        check_uint64("cluster_id", cluster_id)
        check_int64("cache_id", cache_id)
        check_uint32("batch_index", batch_index)
        self._given = (cluster_id, cache_id, batch_index)

    cluster_id = property(lambda self: self._given[0])
    cache_id = property(lambda self: self._given[1])
    batch_index = property(lambda self: self._given[2])


class BlocksCacheKey(_Key):
    """A blocks cache by model id; ranges are not checked."""

    _names = ("cluster_id", "model_id")

    def __init__(self, *args, **kwargs):
        found = {"model_id": 0, **self._bind(args, kwargs)}
        for name in self._names:
            check_isinstance(name, found[name], int)
            setattr(self, f"_{name}", found[name])

    cluster_id = property(lambda self: self._cluster_id)
    model_id = property(lambda self: self._model_id)


class Cache:
    """What the manager gives for a registration."""

    def __init__(self, cache_id, cache_desc, tensor_addrs, is_blocks_cache):
        self._given = [cache_id, cache_desc, tensor_addrs, is_blocks_cache]

    cache_id = property(lambda self: self._given[0])
    cache_desc = property(lambda self: self._given[1])
    tensor_addrs = property(lambda self: self._given[2])
    is_blocks_cache = property(lambda self: self._given[3])

    @classmethod
    def create_cpu_cache(cls, cache_desc, addrs):
        check_isinstance("cache_desc", cache_desc, CacheDesc)
        check_isinstance("addrs", addrs, list, int)
        raise_if_false(cache_desc.placement == Placement.HOST, "a CPU cache is in host memory")
        raise_if_false(len(addrs) == cache_desc.num_tensors, "addrs are not as many as tensors")
        return cls(-1, cache_desc, addrs, True)

    def __str__(self):
        shown = {"cache_id": self.cache_id, "device_tensor_addrs": len(self.tensor_addrs)}
        shown["is_blocks_cache"] = self.is_blocks_cache
        return f"Cache({', '.join(f'{name} = {value}' for name, value in shown.items())})"


class KvCache:
    """Of the old mode: a name only."""


class LayerSynchronizer(ABC):
    @abstractmethod
    def synchronize_layer(self, layer_index, timeout_in_millis):
        """Whether the layer has come."""


def check_layer_range(name, layers):
    check_isinstance(name, layers, range)
    if layers is not None:
        raise_if_false(layers.step == 1 and 0 <= layers.start < layers.stop, f"{name} {layers} is no layer range")


class TransferConfig:
    """A destination by addresses, for the mode without remote access."""

    def __init__(self, dst_cluster_id, dst_addrs, src_layer_range=None, src_batch_index=0):
        check_uint64("dst_cluster_id", dst_cluster_id)
        check_isinstance("dst_addrs", dst_addrs, (list, tuple), int, allow_none=False)
        check_list_uint64("dst_addrs", dst_addrs)
        check_layer_range("src_layer_range", src_layer_range)
        check_uint32("src_batch_index", src_batch_index)
        self.dst_cluster_id = dst_cluster_id
        self.dst_addrs = dst_addrs
        self.src_layer_range = src_layer_range
        self.src_batch_index = src_batch_index
        self.dst_layer_range = None


class TransferWithCacheKeyConfig:
    """A destination by key."""

    def __init__(self, cache_key, src_layer_range, dst_layer_range, src_batch_index=0):
        check_isinstance("cache_key", cache_key, (BlocksCacheKey, CacheKeyByIdAndIndex), allow_none=False)
        for name, layers in (("src_layer_range", src_layer_range), ("dst_layer_range", dst_layer_range)):
            check_isinstance(name, layers, range, allow_none=False)
            check_layer_range(name, layers)
        raise_if_false(len(src_layer_range) == len(dst_layer_range), "layer ranges of unlike length")
        check_uint32("src_batch_index", src_batch_index)
        if isinstance(cache_key, BlocksCacheKey):
            raise_if_false(src_batch_index == 0, "src_batch_index with a BlocksCacheKey")
        self.cache_key = cache_key
        self.src_layer_range = src_layer_range
        self.dst_layer_range = dst_layer_range
        self.src_batch_index = src_batch_index
        self.dst_cluster_id = cache_key.cluster_id


class CacheTask:
    """A job under way; `inner` is the engine's."""

    def __init__(self, inner, to_status):
        self._inner = inner
        self._to_status = to_status

    def synchronize(self, timeout_in_millis=None):
        return self._to_status(self._inner.synchronize(timeout_in_millis))

    def get_results(self, timeout_in_millis=None):
        return [self._to_status(status) for status in self._inner.get_results(timeout_in_millis)]
