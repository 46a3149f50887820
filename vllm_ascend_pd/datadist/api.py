# SPDX-License-Identifier: Apache-2.0
"""What the connector uses of `llm_datadist`, whichever implementation stands behind it.

Values (roles, descriptors, keys, statuses) are typed as our own classes; CANN's have the same names and
attributes. Pull only from worker threads: `pull_blocks` blocks for up to `sync_kv_timeout`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from vllm_ascend_pd.datadist.config import LLMConfig
from vllm_ascend_pd.datadist.status import LLMException, LLMStatusCode
from vllm_ascend_pd.datadist.types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMRole,
    Placement,
    RegisterMemStatus,
)


class Way(str, Enum):
    """How two processes are linked. Both sides must go the same way: the handshake compares it."""

    HOST = "host"  # our own implementation, by address
    HIXL = "hixl"  # CANN's engine of that name, by address
    COMM_RES = "comm_res"  # CANN's communication domain, by address; the package finds the devices itself
    TWO_SIDED = "two_sided"  # CANN's communication domain by rank table; both sides call at the same time


class CacheManagerLike(Protocol):
    """Registration and pull."""

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Register paged memory before any link is made."""

    def unregister_cache(self, cache_id: int) -> None:
        """Forget a cache, after unlinking."""

    def pull_blocks(
        self,
        src_cache_key: BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: list[int],
        dst_blocks: list[int],
        **kwargs: Any,
    ) -> None:
        """Copy a peer's blocks into local ones; blocking. Raises LLMException."""


class DataDist(Protocol):
    """One process's data plane."""

    @property
    def cluster_id(self) -> int:
        """Own id."""

    @property
    def cache_manager(self) -> CacheManagerLike:
        """After `init`."""

    def init(self, options: dict[str, str]) -> None:
        """Start."""

    def finalize(self) -> None:
        """End all links and stop."""

    def link_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link to listening peers."""

    def unlink_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000, force: bool = False
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """End links."""

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Begin a two-sided link; its id. Both sides call it at the same time."""

    def unlink(self, comm_id: int) -> None:
        """End a two-sided link, or its preparation."""

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """How far a two-sided link is."""


@dataclass(frozen=True)
class DataDistModule:
    """One implementation: its classes by the interface's names, and which one it is (`host` or `cann`)."""

    name: str
    LLMDataDist: Callable[[LLMRole, int], DataDist]
    LLMConfig: type[LLMConfig]
    LLMRole: type[LLMRole]
    CacheDesc: type[CacheDesc]
    BlocksCacheKey: type[BlocksCacheKey]
    DataType: type[DataType]
    Placement: type[Placement]
    LLMClusterInfo: type[LLMClusterInfo]
    LLMStatusCode: type[LLMStatusCode]
    LLMException: type[LLMException]
    ways: tuple[Way, ...] = (Way.HOST,)  # how it can link, the best first
