# SPDX-License-Identifier: Apache-2.0
"""Our host `llm_datadist` through its public API: register, link, `pull_blocks`. The settings are the product's.

Timed: the whole call, with the argument checks, the plan and the waiting.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from typing import Any

from vllm_ascend_pd.bench.transfer.contenders import base
from vllm_ascend_pd.bench.transfer.geometry import Request

_SECRET = "5a" * 32  # of this run's two processes on loopback; protects nothing
_CLUSTERS = {base.SOURCE: 1, base.READER: 2}


class Contender(base.Contender):
    """One blocks cache per piece size over the same arena."""

    def make_pool(self) -> int:
        """An arena, as the engine makes it."""
        from vllm_ascend_pd.memory import Arena

        self.arena = Arena.create(self.job.geometry.pool_bytes, f"bench-{self.job.role}")
        ctypes.memset(self.arena.address, 0xA5, self.arena.num_bytes)
        return self.arena.address

    def _start(self) -> None:
        from vllm_ascend_pd import datadist

        self.datadist = datadist
        self.module = datadist.load("host")
        config = self.module.LLMConfig()
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = True
        config.sync_kv_timeout = int(base.PEER_TIMEOUT_S * 1000)
        if self.job.role == base.SOURCE:
            config.listen_ip_info = "127.0.0.1:0"
        extra = {key: value for key, value in self.job.options.items() if key.startswith("pd.")}
        config.ge_options = {
            datadist.OPTION_SECRET: _SECRET,
            datadist.OPTION_TRANSPORT: self.job.options["transport"],
            **extra,
        }
        role = self.module.LLMRole.PROMPT if self.job.role == base.SOURCE else self.module.LLMRole.DECODER
        self.engine = self.module.LLMDataDist(role, _CLUSTERS[self.job.role])
        self.engine.init(config.generate_options())
        self.caches = {piece: self._register(index, piece) for index, piece in enumerate(self.job.pieces)}

    def _register(self, index: int, piece: int) -> tuple[Any, Any]:
        layout = self.job.geometry.layout(piece)
        shape = [layout.num_blocks, piece]
        desc = self.module.CacheDesc(layout.num_tensors, shape, self.module.DataType.DT_INT8)
        addresses = [self.address + tensor * layout.tensor_bytes for tensor in range(layout.num_tensors)]
        key = self.module.BlocksCacheKey(_CLUSTERS[self.job.role], index)
        cache = self.engine.cache_manager.register_blocks_cache(desc, addresses, key)
        return self.module.BlocksCacheKey(_CLUSTERS[base.SOURCE], index), cache

    def hello(self) -> dict[str, Any]:
        """Listen."""
        self._start()
        return {"port": self.datadist.listening_port(self.engine)}

    def connect(self, hello: Mapping[str, Any]) -> dict[str, Any]:
        """Link."""
        self._start()
        info = self.module.LLMClusterInfo()
        info.remote_cluster_id = _CLUSTERS[base.SOURCE]
        info.append_local_ip_info("127.0.0.1", 0)
        info.append_remote_ip_info("127.0.0.1", hello["port"])
        status, _ = self.engine.link_clusters([info], timeout=int(base.PEER_TIMEOUT_S * 1000))
        if status != self.module.LLMStatusCode.LLM_SUCCESS:
            raise RuntimeError(f"link_clusters: {status}")
        transport = self.datadist.link_transport(self.engine, _CLUSTERS[base.SOURCE])
        if transport != self.job.options["transport"]:
            raise RuntimeError(f"the link is {transport}, wanted {self.job.options['transport']}")
        return {"transport": transport, "arena huge pages": self.arena.huge_pages}

    def pull(self, request: Request, variant: str) -> base.Timing:
        """One call."""
        key, cache = self.caches[request.layout.piece_bytes]
        start = time.perf_counter()
        self.engine.cache_manager.pull_blocks(
            key, cache, request.src_blocks, request.dst_blocks, tensor_num_per_layer=1
        )
        return base.Timing(time.perf_counter() - start)

    def close(self) -> None:
        """End the link."""
        if hasattr(self, "engine"):
            self.engine.finalize()
