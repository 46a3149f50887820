# SPDX-License-Identifier: Apache-2.0
"""`LLMDataDist` (datadist-api.md §1)."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import threading

from llm_datadist import _engine
from llm_datadist._release import HAS_COMM_RES, HAS_HIXL, MUTATES_OPTIONS
from llm_datadist.configs import LLMClusterInfo, LLMRole
from llm_datadist.status import LLMException, LLMStatusCode, raise_if_false
from llm_datadist.utils.utils import check_int32, check_isinstance, check_uint64
from llm_datadist.v2.cache_manager import CacheManager
from llm_datadist.v2.llm_types import RegisterMemStatus

_NOT_INITIALIZED = "llm datadist is not initialized"
_OWN_OPTIONS = "pd.host."  # of our host implementation; the real package knows none of them


class LLMDataDist:
    """One engine; one is initialised per process."""

    llm_engine_instance = None

    def __init__(self, role, cluster_id):
        check_isinstance("role", role, LLMRole, allow_none=False)
        check_uint64("cluster_id", cluster_id)
        self._role = role
        self._cluster_id = cluster_id
        self._pid = os.getpid()
        self._inner = None
        self._manager = None
        self._is_hixl = False
        self._comm_res = None
        self._lock = threading.Lock()
        self._dialled = set()  # the peers that this side linked to

    cluster_id = property(lambda self: self._cluster_id)

    def init(self, options):
        if self._inner is not None:
            return
        other = LLMDataDist.llm_engine_instance
        if other is not None:
            status = LLMStatusCode.LLM_FAILED
            raise LLMException(f"Cannot init multiple LLMDataDists ({status})", status_code=status)
        engine = _engine.host.LLMDataDist(_engine.to_host(self._role), self._cluster_id)
        self._is_hixl, passed = self._read(options)
        _engine.call(engine.init, passed)
        self._inner = engine
        self._manager = CacheManager(engine.cache_manager, self._may_transfer)
        self._dialled = set()
        LLMDataDist.llm_engine_instance = self

    def _read(self, options):
        """What the engine underneath gets; refusals that it has itself are left to it."""
        check_isinstance("options", options, dict, allow_none=False)
        given = {key: value for key, value in options.items() if not str(key).startswith(_OWN_OPTIONS)}
        backend = given.get("llm.TransferBackend")
        raise_if_false(HAS_HIXL or backend is None, "this release has no llm.TransferBackend")
        raise_if_false(HAS_COMM_RES or "llm.LocalCommRes" not in given, "this release has no llm.LocalCommRes")
        self._comm_res = given.get("llm.LocalCommRes")
        is_hixl = self._check_backend(given)
        if MUTATES_OPTIONS:
            options["llm.Role"] = {"PROMPT": "Prompt", "DECODER": "Decoder", "MIX": "Mix"}[self._role.name]
        if is_hixl:
            del given["llm.TransferBackend"]
            if str(given["llm.listenIpInfo"]).endswith(":0"):  # a client
                del given["llm.listenIpInfo"]
        # Peers of another backend do not understand one another; and nothing is mapped.
        backend_name = f"stand-in {backend if is_hixl else 'comm'}"
        given["pd.host.secret"] = hashlib.sha256(backend_name.encode()).hexdigest()
        given["pd.host.transport"] = "tcp"
        return is_hixl, given

    @staticmethod
    def _check_backend(given):
        """The rules of that option that the engine underneath does not get to see; whether it is hixl."""
        merged = dict(given)
        if "llm.LocalCommRes" in merged:
            merged.setdefault("llm.EnableCacheManager", "1")
            merged.setdefault("llm.EnableRemoteCacheAccessible", "1")
        if merged.get("llm.TransferBackend") != "hixl":
            return False
        usable = (
            merged.get("llm.EnableCacheManager") == "1"
            and merged.get("llm.EnableRemoteCacheAccessible", "1") == "1"
            and bool(merged.get("llm.listenIpInfo"))
        )
        if usable:
            given.setdefault("llm.EnableRemoteCacheAccessible", "1")
        return usable  # what is not usable is refused underneath, by name

    def finalize(self):
        with self._lock:
            inner, self._inner, self._manager = self._inner, None, None
        if inner is None:
            return
        try:
            inner.finalize()
        finally:
            LLMDataDist.llm_engine_instance = None

    def _running(self):
        inner = self._inner
        if inner is None:
            raise RuntimeError(_NOT_INITIALIZED)
        return inner

    @property
    def cache_manager(self):
        self._running()
        return self._manager

    @property
    def kv_cache_manager(self):
        return _engine.call(lambda: self._running().kv_cache_manager)

    def check_link_status(self, remote_cluster_id):
        _engine.call(self._running().check_link_status, remote_cluster_id)

    # ---- one-sided

    def link_clusters(self, clusters, timeout=3000):
        inner = self._running()
        if isinstance(clusters, (list, tuple)) and self._manager.unusable:
            return LLMStatusCode.LLM_LINK_FAILED, [LLMStatusCode.LLM_LINK_FAILED for _ in clusters]
        if isinstance(clusters, (list, tuple)) and clusters and not self._is_comm_res_valid():
            return LLMStatusCode.LLM_PARAM_INVALID, [LLMStatusCode.LLM_PARAM_INVALID for _ in clusters]
        overall, codes = _engine.call(inner.link_clusters, clusters, timeout)
        for info, code in zip(clusters, codes, strict=True):
            if code.name in ("LLM_SUCCESS", "LLM_ALREADY_LINK") and isinstance(info, LLMClusterInfo):
                self._dialled.add(info.remote_cluster_id)
        return _engine.to_status(overall), [_engine.to_status(code) for code in codes]

    def unlink_clusters(self, clusters, timeout=3000, force=False):
        inner = self._running()
        check_isinstance("force", force, bool, allow_none=False)
        overall, codes = _engine.call(inner.unlink_clusters, clusters, timeout, force or self._is_hixl)
        for info in clusters:
            self._dialled.discard(info.remote_cluster_id)
        return _engine.to_status(overall), [_engine.to_status(code) for code in codes]

    def _may_transfer(self, cluster_id):
        return not self._is_hixl or cluster_id in self._dialled

    def _is_comm_res_valid(self):
        """A description of the local device by hand: one device, of a version that the backend reads."""
        if not self._comm_res:
            return True
        try:
            table = json.loads(self._comm_res)
            version = table["version"]
            if self._is_hixl:
                return version == "1.3"
            (server,) = table["server_list"]
            (device,) = server["device"]
            required = ("device_id", "super_device_id") if version == "1.2" else ("device_id",)
            texts = [server["server_id"], *(device[name] for name in required)]
            return version in ("1.0", "1.2") and all(isinstance(text, str) and text for text in texts)
        except (ValueError, KeyError, TypeError):
            return False

    # ---- two-sided

    def link(self, comm_name, cluster_rank_info, rank_table):
        inner = self._running()
        self._refuse_under_hixl("link")
        if self._manager.unusable:
            status = LLMStatusCode.LLM_LINK_FAILED
            raise LLMException(f"{self._manager.unusable} ({status})", status_code=status)
        comm_id = _engine.call(inner.link, comm_name, cluster_rank_info, rank_table)
        self._manager.set_is_call_linked()
        return comm_id

    def unlink(self, comm_id):
        inner = self._running()
        self._refuse_under_hixl("unlink")
        _engine.call(inner.unlink, comm_id)

    def query_register_mem_status(self, comm_id):
        inner = self._running()
        self._refuse_under_hixl("query_register_mem_status")
        return RegisterMemStatus[_engine.call(inner.query_register_mem_status, comm_id).name]

    def _refuse_under_hixl(self, verb):
        if self._is_hixl:
            status = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
            raise LLMException(f"{verb} with the hixl backend ({status})", status_code=status)

    def switch_role(self, role, switch_options=None):
        inner = self._running()
        check_isinstance("role", role, LLMRole, allow_none=False)
        if self._is_hixl and (switch_options or {}).get("llm.listenIpInfo") != f"127.0.0.1:{inner.listen_port}":
            self._refuse_under_hixl("switch_role to another address")
        check_int32("role", role.value)
        _engine.call(inner.switch_role, role, switch_options)
        self._role = role

    # ---- not in the real package

    @property
    def standin_port(self):
        """Where it listens, for tests that let the system choose."""
        return self._running().listen_port

    def __reduce__(self):
        raise TypeError("LLMDataDist cannot be pickled")


if not HAS_COMM_RES:
    del LLMDataDist.link_clusters, LLMDataDist.unlink_clusters


def _shutdown_handler():
    engine = LLMDataDist.llm_engine_instance
    if engine is None or engine._pid != os.getpid():
        return
    try:
        engine.finalize()
    except LLMException:
        pass


atexit.register(_shutdown_handler)
