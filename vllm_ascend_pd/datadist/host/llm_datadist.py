# SPDX-License-Identifier: Apache-2.0
"""`LLMDataDist` of the host implementation: direct mode only (§1).

Not implemented, and refused with LLM_FEATURE_NOT_ENABLED: message mode, the hixl backend; ImportError for the old
mode without cache manager. docs/datadist.md has every rule and where ours is stricter than the real engine.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from typing import ClassVar, NoReturn

from vllm_ascend_pd.datadist.host.cache_manager import CacheManager
from vllm_ascend_pd.datadist.host.engine import Engine
from vllm_ascend_pd.datadist.host.options import parse_listen, parse_options
from vllm_ascend_pd.datadist.host.pools import Pools
from vllm_ascend_pd.datadist.host.two_sided import TwoSidedLinks, parse_link_time
from vllm_ascend_pd.datadist.status import (
    LLMException,
    LLMStatusCode,
    check_int32,
    check_int64,
    check_integer,
    check_type,
    check_uint64,
    fail,
    require,
)
from vllm_ascend_pd.datadist.types import LLMClusterInfo, LLMRole, RegisterMemStatus

_NOT_INITIALIZED = "llm datadist is not initialized"


class LLMDataDist:
    """The process-wide entry point; at most one instance is initialised at a time."""

    llm_engine_instance: ClassVar[LLMDataDist | None] = None
    _instance_lock: ClassVar[threading.Lock] = threading.Lock()  # guards llm_engine_instance

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        check_type("role", role, LLMRole, allow_none=False)
        check_uint64("cluster_id", cluster_id)
        self._role = role
        self._cluster_id = cluster_id
        self.owner_pid = 0  # of the process that initialised it
        self._engine: Engine | None = None
        self._cache_manager: CacheManager | None = None
        self._two_sided: TwoSidedLinks | None = None

    def init(self, options: dict[str, str]) -> None:
        """Start the engine. Nothing happens when this instance is initialised already."""
        if self._engine is not None:
            return
        with LLMDataDist._instance_lock:
            if LLMDataDist.llm_engine_instance is not None:
                fail(LLMStatusCode.LLM_FAILED, "Cannot init multiple LLMDataDists")
            parsed, link_time = parse_options(options), parse_link_time(options)
            pools = Pools(options)
            engine = Engine(self._cluster_id, parsed)
            self._engine, self._cache_manager = engine, CacheManager(engine, pools)
            self._two_sided = TwoSidedLinks(engine, link_time)
            self.owner_pid = os.getpid()
            LLMDataDist.llm_engine_instance = self

    def finalize(self) -> None:
        """Wait for running calls, end all links, stop listening; `init` may follow. Idempotent."""
        with LLMDataDist._instance_lock:
            engine, self._engine, self._cache_manager = self._engine, None, None
            two_sided, self._two_sided = self._two_sided, None
            if engine is None or two_sided is None:
                return
            try:
                two_sided.close()
                engine.finalize()
            finally:
                LLMDataDist.llm_engine_instance = None

    def _running(self) -> Engine:
        engine = self._engine
        if engine is None:
            raise RuntimeError(_NOT_INITIALIZED)
        return engine

    @property
    def cluster_id(self) -> int:
        """Own cluster id."""
        return self._cluster_id

    @property
    def cache_manager(self) -> CacheManager:
        """Raises RuntimeError before `init`."""
        self._running()
        assert self._cache_manager is not None
        return self._cache_manager

    @property
    def kv_cache_manager(self) -> NoReturn:
        """Only in the old mode."""
        self._running()
        fail(LLMStatusCode.LLM_PARAM_INVALID, "kv_cache_manager needs the mode without cache manager")

    @property
    def listen_port(self) -> int | None:
        """Host implementation only: the port that peers link to; None when not listening."""
        return self._running().listen_port

    def link_transport(self, remote_cluster_id: int) -> str:
        """Host implementation only: `mapped` or `tcp`. Raises LLMException(LLM_NOT_YET_LINK)."""
        return self._running().get_link(remote_cluster_id).transport

    def link_counts(self, remote_cluster_id: int) -> dict[str, int]:
        """Host implementation only: calls, descriptors, bytes, nanoseconds. Raises LLMException(LLM_NOT_YET_LINK)."""
        return self._running().get_link(remote_cluster_id).stats._asdict()

    def link_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link to listening peers, in parallel; `timeout` in ms. One status per peer and the last failure."""
        engine = self._running()
        _check_clusters(clusters, timeout)
        for info in clusters:
            given = bool(info.local_ip_info_list) or engine.options.has_comm_res
            require(given, "local_ip_info_list must not be empty")
        with engine.call():
            return engine.link_clusters(clusters, timeout)

    def unlink_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000, force: bool = False
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """End links on both sides, or with `force` on this side only. Peers that are not linked: success."""
        engine = self._running()
        check_type("force", force, bool, allow_none=False)
        _check_clusters(clusters, timeout)
        with engine.call():
            return engine.unlink_clusters(clusters, timeout, force)

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """With `llm.listenIpInfo` listen there, without stop listening. Raises LLM_EXIST_LINK while linked."""
        engine = self._running()
        check_type("role", role, LLMRole, allow_none=False)
        check_type("switch_options", switch_options, dict)
        text = (switch_options or {}).get("llm.listenIpInfo")
        with engine.call():
            if self._comms().has_live:
                fail(LLMStatusCode.LLM_EXIST_LINK, "switch_role while a two-sided link exists")
            engine.switch_listening(parse_listen(text) if text else None)
        self._role = role

    def _comms(self) -> TwoSidedLinks:
        two_sided = self._two_sided
        if two_sided is None:
            raise RuntimeError(_NOT_INITIALIZED)
        return two_sided

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Begin a two-sided link, which all members must; its id. Poll `query_register_mem_status` until OK."""
        engine = self._running()
        _check_two_sided(comm_name, cluster_rank_info, rank_table)
        with engine.call():
            comm_id = self._comms().link(comm_name, cluster_rank_info, rank_table)
            self.cache_manager.set_is_call_linked()
        return comm_id

    def unlink(self, comm_id: int) -> None:
        """End a two-sided link, or its preparation. Raises LLM_NOT_YET_LINK, LLM_UNLINK_FAILED."""
        engine = self._running()
        check_int64("comm_id", comm_id)
        with engine.call():
            self._comms().unlink(comm_id)

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """How far a two-sided link is. Raises LLM_NOT_YET_LINK."""
        engine = self._running()
        check_int64("comm_id", comm_id)
        with engine.call():
            return self._comms().query(comm_id)

    def check_link_status(self, remote_cluster_id: int) -> NoReturn:
        """Only in the old mode."""
        self._running()
        fail(LLMStatusCode.LLM_PARAM_INVALID, f"check_link_status({remote_cluster_id}) needs the old mode")

    def __reduce__(self) -> NoReturn:
        raise TypeError("LLMDataDist cannot be pickled")


def _check_clusters(clusters: Sequence[LLMClusterInfo], timeout: int) -> None:
    check_type("clusters", clusters, (list, tuple), LLMClusterInfo, allow_none=False)
    check_int32("timeout", timeout)
    require(timeout > 0, f"timeout must be positive, not {timeout}")
    for info in clusters:
        check_uint64("remote_cluster_id", info.remote_cluster_id)


def _check_two_sided(comm_name: str, ranks: dict[int, int], rank_table: str) -> None:
    check_type("comm_name", comm_name, str, allow_none=False)
    check_type("cluster_rank_info", ranks, dict, int, allow_none=False)
    check_type("cluster_rank_info", list(ranks.values()), list, int)
    check_type("rank_table", rank_table, str, allow_none=False)
    require(0 < len(comm_name) < 128, f"comm_name has {len(comm_name)} characters")
    require(2 <= len(ranks) <= 4, f"cluster_rank_info has {len(ranks)} entries")
    for cluster_id, rank in ranks.items():
        check_uint64("cluster id", cluster_id)
        check_integer("rank", rank, 0, 2**32 - 1, "uint32")
    values = list(ranks.values())
    require(values == sorted(set(values)), f"cluster_rank_info: ranks {values} must ascend")


def _finalize_at_exit() -> None:
    instance = LLMDataDist.llm_engine_instance
    if instance is not None and instance.owner_pid == os.getpid():  # a forked child has no threads to end
        try:
            instance.finalize()
        except LLMException:
            pass  # the process ends anyway


atexit.register(_finalize_at_exit)
