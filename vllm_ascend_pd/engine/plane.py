# SPDX-License-Identifier: Apache-2.0
"""One rank's data plane at start: the engine of `llm_datadist`, its address, and the caches registered with it.

Runs in the worker's main thread, once, before the first link: what is registered later cannot be reached over one.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd import datadist
from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.plan.layout import CacheLayout
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.wire import DeviceAddress


@dataclass
class DataPlane:
    """Started, nothing registered yet."""

    module: Any
    engine: Any
    way: datadist.Way
    cluster_id: int
    host: str  # numeric, own
    port: int  # 0: it does not listen
    device_index: int  # logical; 0 on CPU
    device: DeviceAddress | None  # None on CPU

    @property
    def manager(self) -> Any:
        """datadist's CacheManager."""
        return self.engine.cache_manager

    def register(self, layout: CacheLayout) -> list[Any]:
        """One blocks cache for each of the layout's, with its index as model_id. Raises LLMException."""
        module = self.module
        return [
            self.manager.register_blocks_cache(
                module.CacheDesc(
                    len(regions), [regions[0].num_blocks, regions[0].block_bytes], module.DataType.DT_UINT8
                ),
                [region.address for region in regions],
                module.BlocksCacheKey(self.cluster_id, model_id),
                remote_accessible=True,
            )
            for model_id, regions in enumerate(layout.caches)
        ]


def start_plane(config: PDConfig, secret: Secret, device_index: int) -> DataPlane:
    """Choose the implementation and the way to link, and come up. `device_index`: logical; 0 on CPU.

    Raises:
        PDConfigError: there is no way to link, no port, or no address.
        LLMException: the data plane refused; its message has the status code.
    """
    module = datadist.load()
    way = datadist.choose_way(module, bool(config.rank_table))
    is_prefill = config.role is PDRole.PREFILL
    # CANN describes a decode rank's device by its host's address, too: it must not be a wildcard.
    tells_host = is_prefill or module.name != "host"
    host = to_ipv4(config.advertise_host if tells_host else config.listen_host)
    settings = datadist.DataPlaneSettings(
        is_prefill=is_prefill,
        host=host,
        way=way,
        sync_timeout_ms=max(1000, config.deadline_ms // 2),
        listen_port=config.listen_port,
        device_index=device_index,
        secret_hex=secret.derive("datadist").hex(),
        host_transport=config.host_transport,
    )
    cluster_id = secrets.randbits(63)
    engine = module.LLMDataDist(module.LLMRole.PROMPT if is_prefill else module.LLMRole.DECODER, cluster_id)
    port = datadist.start(module, engine, settings)
    device = datadist.own_device(module, way, device_index, config.rank_table, config.role.value)
    return DataPlane(module, engine, way, cluster_id, host, port, device_index, device)


def to_ipv4(host: str) -> str:
    """llm_datadist takes numeric IPv4 addresses only (reference: `LLMClusterInfo`).

    Raises:
        PDConfigError: a host that has none.
    """
    if host in ("::1", "localhost"):
        return "127.0.0.1"
    try:
        info = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise PDConfigError(
            f"--pd-listen: {host} has no IPv4 address, and the data plane of this release needs one: {error}"
        ) from error
    return str(info[0][4][0])
