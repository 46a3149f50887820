# SPDX-License-Identifier: Apache-2.0
"""What the connector uses of `llm_datadist`, whichever implementation stands behind it.

Values (roles, descriptors, keys, statuses) are typed as our own classes; CANN's have the same names and
attributes. Pull only from worker threads: `pull_blocks` blocks for up to `sync_kv_timeout`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
)


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
