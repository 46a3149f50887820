# SPDX-License-Identifier: Apache-2.0
"""CANN's `LLMDataDist` behind checks of what it would accept and then fail at, or do wrongly, much later.

Registration is checked here because the package reports bad memory only when a link is made, or takes over a
model_id silently. Everything else is passed on; what its binding raises for bad values becomes an LLMException, so
that callers meet one kind of failure. Any thread; registration is the engine thread's, before the first link.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from vllm_ascend_pd.errors import PDConfigError

logger = logging.getLogger(__name__)

ALIGNMENT: Final = 2 << 20  # Source: datadist-api.md §4.1
MAX_REGIONS: Final = 256  # Source: ascend.md §9
DOCUMENTED_REGIONS: Final = 240  # Source: datadist-api.md §4.1
DOCUMENTED_DEVICE_BYTES: Final = 50 << 30  # Source: datadist-api.md §4.1

Result = TypeVar("Result")


class GuardedDataDist:
    """The package's `LLMDataDist` as `api.DataDist`."""

    def __init__(self, engine: Any, package: Any) -> None:
        self._engine = engine
        self._package = package
        self._manager: GuardedManager | None = None

    @property
    def cluster_id(self) -> int:
        """Own id."""
        return int(self._engine.cluster_id)

    @property
    def cache_manager(self) -> GuardedManager:
        """After `init`."""
        if self._manager is None:
            self._manager = GuardedManager(self._engine.cache_manager, self._package)
        return self._manager

    def init(self, options: dict[str, str]) -> None:
        """Start. Some releases write into what they are given: they get a copy."""
        self._call(self._engine.init, dict(options))

    def finalize(self) -> None:
        """End all links and stop."""
        self._engine.finalize()
        self._manager = None

    def link_clusters(self, clusters: Sequence[Any], timeout: int = 3000) -> tuple[Any, list[Any]]:
        """Link to listening peers."""
        self.cache_manager.seal()
        found: tuple[Any, list[Any]] = self._call(self._engine.link_clusters, list(clusters), timeout)
        return found

    def unlink_clusters(
        self, clusters: Sequence[Any], timeout: int = 3000, force: bool = False
    ) -> tuple[Any, list[Any]]:
        """End links."""
        found: tuple[Any, list[Any]] = self._call(self._engine.unlink_clusters, list(clusters), timeout, force)
        return found

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Begin a two-sided link; its id."""
        self.cache_manager.seal()
        return int(self._call(self._engine.link, comm_name, cluster_rank_info, rank_table))

    def unlink(self, comm_id: int) -> None:
        """End a two-sided link, or its preparation."""
        self._call(self._engine.unlink, comm_id)

    def query_register_mem_status(self, comm_id: int) -> Any:
        """How far a two-sided link is."""
        return self._call(self._engine.query_register_mem_status, comm_id)

    def _call(self, function: Callable[..., Result], *args: Any) -> Result:
        return call(self._package, function, *args)


class GuardedManager:
    """The package's `CacheManager`, with its limits enforced when memory is registered."""

    def __init__(self, manager: Any, package: Any) -> None:
        self._manager = manager
        self._package = package
        self._names: dict[int, int] = {}  # model_id -> cache id
        self._num_addresses: dict[int, int] = {}  # cache id -> how many
        self._num_bytes = 0
        self._sealed = False

    def seal(self) -> None:
        """A link is being made: what is registered from now on could not be reached over it."""
        self._sealed = True

    def register_blocks_cache(
        self,
        cache_desc: Any,
        addrs: list[int],
        blocks_cache_key: Any = None,
        remote_accessible: bool | None = None,
    ) -> Any:
        """Register paged memory.

        Raises:
            PDConfigError: beyond a limit of the package; says which.
            LLMException: of the package.
        """
        model_id = None if blocks_cache_key is None else int(blocks_cache_key.model_id)
        self._check(addrs, model_id)
        total = sum(self._num_addresses.values()) + len(addrs)
        if total > DOCUMENTED_REGIONS:
            logger.warning(
                "%d regions are registered with the data plane; llm_datadist documents %d", total, DOCUMENTED_REGIONS
            )
        self._num_bytes += len(addrs) * int(cache_desc.size)
        if self._num_bytes > DOCUMENTED_DEVICE_BYTES:
            logger.warning(
                "%.1f GiB are registered with the data plane; llm_datadist documents %d GiB",
                self._num_bytes / (1 << 30),
                DOCUMENTED_DEVICE_BYTES >> 30,
            )
        cache = call(
            self._package,
            self._manager.register_blocks_cache,
            cache_desc,
            list(addrs),
            blocks_cache_key,
            remote_accessible,
        )
        self._num_addresses[int(cache.cache_id)] = len(addrs)
        if model_id is not None:
            self._names[model_id] = int(cache.cache_id)
        return cache

    def _check(self, addrs: Sequence[int], model_id: int | None) -> None:
        if self._sealed:
            raise PDConfigError("data plane: memory is registered after the first link, which could not reach it")
        registered = sum(self._num_addresses.values())
        if registered + len(addrs) > MAX_REGIONS:
            raise PDConfigError(
                f"data plane: {registered + len(addrs)} memory regions to register, llm_datadist takes {MAX_REGIONS} "
                "per process; use more pipeline stages, or a KV cache with fewer tensors"
            )
        if model_id is not None and model_id in self._names:
            raise PDConfigError(
                f"data plane: model_id {model_id} is registered twice; pulls would silently go to the second cache"
            )
        for index, address in enumerate(addrs):
            if address % ALIGNMENT:
                raise PDConfigError(
                    f"data plane: tensor {index} of model_id {model_id} begins at {address:#x}, which is no multiple "
                    f"of {ALIGNMENT} (it is {math.gcd(address, ALIGNMENT)}-aligned); links over HCCS need that"
                )

    def unregister_cache(self, cache_id: int) -> None:
        """Forget a cache, after unlinking."""
        call(self._package, self._manager.unregister_cache, cache_id)
        self._num_addresses.pop(cache_id, None)
        self._names = {name: cache for name, cache in self._names.items() if cache != cache_id}

    def pull_blocks(self, src_cache_key: Any, dst_cache: Any, src_blocks: Any, dst_blocks: Any, **kwargs: Any) -> None:
        """Copy a peer's blocks into local ones; blocking. Raises LLMException."""
        call(
            self._package,
            self._manager.pull_blocks,
            src_cache_key,
            dst_cache,
            list(src_blocks),
            list(dst_blocks),
            **kwargs,
        )


def call(package: Any, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call the package; a TypeError or ValueError of its checks or binding becomes LLM_PARAM_INVALID."""
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        name = getattr(function, "__name__", "call")
        raise package.LLMException(f"{name}: {error}", status_code=package.LLMStatusCode.LLM_PARAM_INVALID) from error
