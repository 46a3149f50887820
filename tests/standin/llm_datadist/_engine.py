# SPDX-License-Identifier: Apache-2.0
"""The stand-in's engine: our host implementation, with values translated there and back.

Not in the real package, where an extension module is in this place.
"""

from __future__ import annotations

from llm_datadist import configs, data_type, status
from llm_datadist.v2 import llm_types as types
from vllm_ascend_pd.datadist.host import surface as host

_ENUMS = {
    configs.LLMRole: host.LLMRole,
    types.Placement: host.Placement,
    data_type.DataType: host.DataType,
    types.Memtype: host.Memtype,
}


def to_status(value):
    """The package's status for the host's; None stays None."""
    return None if value is None else status.LLMStatusCode[value.name]


class _Layers(host.LayerSynchronizer):
    def __init__(self, given):
        self._given = given

    def synchronize_layer(self, layer_index, timeout_in_millis):
        return self._given.synchronize_layer(layer_index, timeout_in_millis)


def _desc(desc):
    return host.CacheDesc(
        desc.num_tensors,
        desc.shape,
        to_host(desc.data_type),
        to_host(desc.placement),
        desc.batch_dim,
        desc.seq_len_dim_index,
        desc.kv_tensor_format,
    )


def _cluster(info):
    made = host.LLMClusterInfo()
    made._remote_cluster_id = info.remote_cluster_id
    made.local_ip_info_list = list(info.local_ip_info_list)
    made.remote_ip_info_list = list(info.remote_ip_info_list)
    return made


_CONVERSIONS = {
    types.CacheDesc: _desc,
    types.Cache: lambda cache: host.Cache(
        cache.cache_id, _desc(cache.cache_desc), cache.tensor_addrs, cache.is_blocks_cache
    ),
    types.CacheKey: lambda key: host.CacheKey(key.cluster_id, key.req_id, key.model_id, key.prefix_id),
    types.CacheKeyByIdAndIndex: lambda key: host.CacheKeyByIdAndIndex(key.cluster_id, key.cache_id, key.batch_index),
    types.BlocksCacheKey: lambda key: host.BlocksCacheKey(key.cluster_id, key.model_id),
    types.MemInfo: lambda info: host.MemInfo(to_host(info.mem_type), info.addr, info.size),
    types.TransferWithCacheKeyConfig: lambda config: host.TransferWithCacheKeyConfig(
        to_host(config.cache_key), config.src_layer_range, config.dst_layer_range, config.src_batch_index
    ),
    configs.LLMClusterInfo: _cluster,
}


def to_host(value):
    """A value of the package as the host's; what is none of the package's values stays, for the host to refuse."""
    if type(value) in _ENUMS:
        return _ENUMS[type(value)][value.name]
    if type(value) in _CONVERSIONS:
        return _CONVERSIONS[type(value)](value)
    if isinstance(value, types.LayerSynchronizer):
        return _Layers(value)
    if type(value) in (list, tuple):
        return type(value)(to_host(item) for item in value)
    return value


def call(function, *args, **kwargs):
    """Call the host with translated values; its exception becomes the package's."""
    try:
        return function(*to_host(args), **{name: to_host(value) for name, value in kwargs.items()})
    except host.LLMException as error:
        raise status.LLMException(str(error), status_code=to_status(error.status_code)) from error
