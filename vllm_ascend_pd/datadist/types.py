# SPDX-License-Identifier: Apache-2.0
"""Value types of `llm_datadist`: enumerations, cache descriptors, keys, peers (datadist-api.md §3).

Plain data with the interface's argument checks; no thread, no state.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Any, Final

from vllm_ascend_pd.datadist.status import (
    check_int32,
    check_int64,
    check_type,
    check_uint16,
    check_uint32,
    check_uint64,
    require,
)

INVALID_ID: Final = 2**64 - 1


class _NamedIntEnum(IntEnum):
    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class LLMRole(_NamedIntEnum):
    """What a process is for; says nothing about who links or pulls."""

    PROMPT = 1
    DECODER = 2
    MIX = 3


class Placement(_NamedIntEnum):
    """Where a cache lies."""

    HOST = 0
    DEVICE = 1


class RegisterMemStatus(Enum):
    """Progress of a two-sided link."""

    OK = 0
    PREPARING = 1
    FAILED = 2


class DataType(Enum):
    """Element types; the value is the interface's id."""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_STRING = 13
    DT_BF16 = 27


_ITEM_BYTES: Final = {
    DataType.DT_FLOAT: 4,
    DataType.DT_FLOAT16: 2,
    DataType.DT_INT8: 1,
    DataType.DT_INT32: 4,
    DataType.DT_UINT8: 1,
    DataType.DT_INT16: 2,
    DataType.DT_UINT16: 2,
    DataType.DT_UINT32: 4,
    DataType.DT_INT64: 8,
    DataType.DT_UINT64: 8,
    DataType.DT_DOUBLE: 8,
    DataType.DT_BOOL: 1,
    DataType.DT_STRING: 16,
    DataType.DT_BF16: 2,
}


class CacheDesc:
    """`num_tensors` tensors of one shape and type; `shape[0]` counts batch slots or blocks."""

    def __init__(
        self,
        num_tensors: int,
        shape: Sequence[int],
        data_type: DataType,
        placement: Placement = Placement.DEVICE,
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: str | None = None,
    ) -> None:
        check_uint32("num_tensors", num_tensors)
        check_type("shape", shape, (list, tuple), int, allow_none=False)
        for extent in shape:
            check_int64("shape", extent)
        check_type("data_type", data_type, DataType, allow_none=False)
        check_type("placement", placement, Placement, allow_none=False)
        check_int32("batch_dim_index", batch_dim_index)
        check_int32("seq_len_dim_index", seq_len_dim_index)
        require(
            0 <= batch_dim_index < len(shape),
            f"batch_dim_index {batch_dim_index} is outside a shape of rank {len(shape)}",
        )
        require(
            -1 <= seq_len_dim_index < len(shape),
            f"seq_len_dim_index {seq_len_dim_index} is outside a shape of rank {len(shape)}",
        )
        self._num_tensors = num_tensors
        self._shape = shape
        self._data_type = data_type
        self._placement = placement
        self._batch_dim_index = batch_dim_index
        self._batch_size = shape[batch_dim_index]
        self._seq_len_dim_index = seq_len_dim_index
        self._kv_tensor_format = kv_tensor_format

    num_tensors = property(lambda self: self._num_tensors, doc="Tensors of the cache, layer-major.")
    shape = property(lambda self: self._shape, doc="Of one tensor.")
    data_type = property(lambda self: self._data_type, doc="Element type.")
    placement = property(lambda self: self._placement, doc="Host or device.")
    batch_dim = property(lambda self: self._batch_dim_index, doc="Index given at construction.")
    batch_size = property(lambda self: self._batch_size, doc="Extent of that dimension.")
    seq_len_dim_index = property(lambda self: self._seq_len_dim_index, doc="-1: none.")
    kv_tensor_format = property(lambda self: self._kv_tensor_format, doc="Not interpreted.")

    @property
    def size(self) -> int:
        """Bytes of one tensor. Raises LLMException when an extent is not positive."""
        require(all(extent > 0 for extent in self._shape), f"shape {self._shape} has no size")
        return math.prod(self._shape) * _ITEM_BYTES[self._data_type]

    def update_dim(self, index: int, value: int) -> None:
        """Change one extent of a list shape (TypeError for a tuple)."""
        self._shape[index] = value  # type: ignore[index]

    def __str__(self) -> str:
        return (
            f"CacheDesc(num_tensors = {self._num_tensors}, shape = {list(self._shape)}, "
            f"data_type = {self._data_type}, placement = {self._placement})"
        )


class CacheKey:
    """Names a batch slot by request or prefix: `(cluster_id, req_id, model_id=0, prefix_id=none)`."""

    def __init__(self, *args: int, **kwargs: int) -> None:
        names = ("cluster_id", "req_id", "model_id", "prefix_id")
        values = _bind("CacheKey", names, args, kwargs)
        for required in names[:2]:
            require(required in values, f"CacheKey: {required} is missing")
        self.cluster_id = values["cluster_id"]
        self.req_id = values["req_id"]
        self.model_id = values.get("model_id", 0)
        self.prefix_id = values.get("prefix_id", INVALID_ID)
        for name in names:
            check_uint64(name, getattr(self, name))

    @property
    def prompt_cluster_id(self) -> int:
        """Old name of `cluster_id`."""
        return self.cluster_id

    def __str__(self) -> str:
        return (
            f"CacheKey(cluster_id = {self.cluster_id}, req_id = {self.req_id}, "
            f"model_id = {self.model_id}, prefix_id = {self.prefix_id})"
        )


class CacheKeyByIdAndIndex:
    """Names a batch slot of a peer's cache by cache id."""

    def __init__(self, cluster_id: int, cache_id: int, batch_index: int = 0) -> None:
        check_uint64("cluster_id", cluster_id)
        check_int64("cache_id", cache_id)
        check_uint32("batch_index", batch_index)
        self.cluster_id = cluster_id
        self.cache_id = cache_id
        self.batch_index = batch_index

    @property
    def prompt_cluster_id(self) -> int:
        """Old name of `cluster_id`."""
        return self.cluster_id

    def __str__(self) -> str:
        return (
            f"CacheKeyByIdAndIndex(cluster_id = {self.cluster_id}, cache_id = {self.cache_id}, "
            f"batch_index = {self.batch_index})"
        )


class BlocksCacheKey:
    """Names a peer's blocks cache by model id: `(cluster_id, model_id=0)`."""

    def __init__(self, *args: int, **kwargs: int) -> None:
        values = _bind("BlocksCacheKey", ("cluster_id", "model_id"), args, kwargs)
        require("cluster_id" in values, "BlocksCacheKey: cluster_id is missing")
        self.cluster_id = values["cluster_id"]
        self.model_id = values.get("model_id", 0)
        check_type("cluster_id", self.cluster_id, int)
        check_type("model_id", self.model_id, int)

    @property
    def prompt_cluster_id(self) -> int:
        """Old name of `cluster_id`."""
        return self.cluster_id

    def __str__(self) -> str:
        return f"BlocksCacheKey(cluster_id = {self.cluster_id}, model_id = {self.model_id})"


def _bind(owner: str, names: tuple[str, ...], args: tuple[int, ...], kwargs: dict[str, int]) -> dict[str, int]:
    require(len(args) + len(kwargs) <= len(names), f"{owner} takes at most {len(names)} parameters")
    values = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        target = "cluster_id" if name == "prompt_cluster_id" else name
        require(target in names, f"{owner} has no parameter {name}")
        require(target not in values, f"{owner}: {target} is given twice")
        values[target] = value
    return values


class Cache:
    """A registered cache; made by the cache manager, or by `create_cpu_cache` as an operand of swap_blocks."""

    def __init__(self, cache_id: int, cache_desc: CacheDesc, tensor_addrs: list[int], is_blocks: bool) -> None:
        self.cache_id = cache_id
        self.cache_desc = cache_desc
        self.tensor_addrs = tensor_addrs
        self.is_blocks_cache = is_blocks

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int]) -> Cache:
        """A blocks cache in host memory, not registered."""
        check_type("cache_desc", cache_desc, CacheDesc)
        check_type("addrs", addrs, list, int)
        require(cache_desc.placement == Placement.HOST, "a CPU cache needs placement HOST")
        count = len(addrs)
        require(count == cache_desc.num_tensors, f"{count} addrs for {cache_desc.num_tensors} tensors")
        return cls(-1, cache_desc, addrs, True)

    def __str__(self) -> str:
        return (
            f"Cache(cache_id = {self.cache_id}, device_tensor_addrs = {len(self.tensor_addrs)}, "
            f"is_blocks_cache = {self.is_blocks_cache})"
        )


class LLMClusterInfo:
    """A peer to link to: its cluster id and one address; IPv4 only, as in the interface."""

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: Any = LLMRole.PROMPT
        self.local_ip_info_list: list[tuple[int, int]] = []
        self.remote_ip_info_list: list[tuple[int, int]] = []

    @property
    def remote_cluster_id(self) -> int | None:
        """The peer's cluster id; None until set."""
        return self._remote_cluster_id

    @remote_cluster_id.setter
    def remote_cluster_id(self, value: int) -> None:
        check_uint64("remote_cluster_id", value)
        self._remote_cluster_id = value

    @property
    def remote_role_type(self) -> LLMRole | int:
        """Accepted and ignored."""
        role: LLMRole | int = self._remote_role_type
        return role

    @remote_role_type.setter
    def remote_role_type(self, value: LLMRole | int) -> None:
        check_type("remote_role_type", value, (LLMRole, int))
        self._remote_role_type = value

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        """Own address; needed by `link_clusters`, port 0 is usual."""
        self.local_ip_info_list.append(_to_ip_info(ip, port))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """The address that the peer listens on."""
        self.remote_ip_info_list.append(_to_ip_info(ip, port))


def _to_ip_info(ip: str | int, port: int) -> tuple[int, int]:
    check_type("ip", ip, (str, int), allow_none=False)
    check_uint16("port", port)
    if isinstance(ip, int):
        check_uint32("ip", ip)
        return ip, port
    try:
        packed = socket.inet_aton(ip)
    except OSError:
        raise RuntimeError(f"Can not parse ip str:{ip}") from None
    return int(struct.unpack("<I", packed)[0]), port


def to_ip_text(ip: int) -> str:
    """The dotted form of an address of LLMClusterInfo."""
    return socket.inet_ntoa(struct.pack("<I", ip))


def check_layer_range(name: str, layers: range | None) -> None:
    """A layer range is a `range` of step 1 with 0 <= start < stop, or None."""
    check_type(name, layers, range)
    if layers is not None:
        require(layers.step == 1 and 0 <= layers.start < layers.stop, f"{name} {layers} is not 0 <= start < stop")


_PLAIN_INTEGERS: Final = frozenset((int, bool))


def check_block_ids(name: str, blocks: Sequence[int]) -> None:
    """A list or tuple of ints; negative ids are a TypeError: the real binding cannot turn them into uint64."""
    check_type(name, blocks, (list, tuple), allow_none=False)
    if not _PLAIN_INTEGERS.issuperset(map(type, blocks)):  # one pass without a step of Python's per block
        check_type(name, blocks, (list, tuple), int)
    if blocks and min(blocks) < 0:
        raise TypeError(f"{name}: block {min(blocks)} is negative")
