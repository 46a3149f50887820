# SPDX-License-Identifier: Apache-2.0
"""`LLMDataDist.init`, `finalize` and `switch_role` (datadist-api.md §1.1, §1.4), and the choice of implementation."""

from __future__ import annotations

import pickle
import socket
import sys
import threading
import types

import pytest

from tests.unit.datadist.datadist_peer import SECRET, make_options
from vllm_ascend_pd import datadist
from vllm_ascend_pd.datadist import choose
from vllm_ascend_pd.datadist.host.llm_datadist import LLMDataDist
from vllm_ascend_pd.datadist.status import LLMException, LLMStatusCode
from vllm_ascend_pd.datadist.types import CacheDesc, CacheKey, DataType, LLMClusterInfo, LLMRole

DIRECT = {"llm.EnableCacheManager": "1", "llm.EnableRemoteCacheAccessible": "1"}


@pytest.fixture
def engine():
    instance = LLMDataDist(LLMRole.PROMPT, 1)
    yield instance
    instance.finalize()


@pytest.mark.parametrize(
    ("role", "cluster_id", "error"),
    [(1, 1, TypeError), (LLMRole.MIX, "1", TypeError), (LLMRole.MIX, -1, ValueError), (LLMRole.MIX, 2**64, ValueError)],
)
def test_constructor_checks_its_arguments(role, cluster_id, error):
    with pytest.raises(error):
        LLMDataDist(role, cluster_id)


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({**DIRECT, "llm.listenIpInfo": "127.0.0.1"}, "LLM_PARAM_INVALID"),
        ({**DIRECT, "llm.listenIpInfo": "::1:80"}, "LLM_PARAM_INVALID"),
        ({**DIRECT, "llm.listenIpInfo": "localhost:80"}, "LLM_PARAM_INVALID"),
        ({**DIRECT, "llm.listenIpInfo": "127.0.0.1:65536"}, "LLM_PARAM_INVALID"),
        ({**DIRECT, "llm.listenIpInfo": "0.0.0.0:0"}, "LLM_PARAM_INVALID"),  # no secret
        ({**DIRECT, "llm.listenIpInfo": "192.0.2.1:80", "pd.host.secret": SECRET}, "LLM_FAILED"),  # not ours
        ({**DIRECT, "ge.flowGraphMemMaxSize": "1,2"}, "LLM_PARAM_INVALID"),
        ({**DIRECT, "ge.exec.deviceId": "0;1"}, "LLM_PARAM_INVALID"),
        ({**DIRECT, "llm.SyncKvCacheWaitTime": "soon"}, "LLM_PARAM_INVALID"),
        ({**DIRECT, "llm.LinkRetryCount": "0"}, "LLM_PARAM_INVALID"),
        ({**DIRECT, "llm.EnableRemoteCacheAccessible": "yes"}, "LLM_FAILED"),
        ({"llm.LocalCommRes": "", "llm.EnableCacheManager": "0"}, "LLM_PARAM_INVALID"),
        ({"llm.TransferBackend": "hixl"}, "LLM_PARAM_INVALID"),  # no cache manager
        ({**DIRECT, "llm.TransferBackend": "hixl"}, "LLM_PARAM_INVALID"),  # no listen address
        ({**DIRECT, "llm.TransferBackend": "x", "llm.listenIpInfo": "127.0.0.1:0"}, "LLM_PARAM_INVALID"),
        ({**DIRECT, "llm.TransferBackend": "hixl", "llm.listenIpInfo": "127.0.0.1:0"}, "LLM_FEATURE_NOT_ENABLED"),
        ({"llm.EnableCacheManager": "1"}, "LLM_FEATURE_NOT_ENABLED"),  # message mode
        ({**DIRECT, "pd.host.secret": "zz"}, "LLM_PARAM_INVALID"),
        ({**DIRECT, "pd.host.secret": "ab" * 15}, "LLM_PARAM_INVALID"),
        ({**DIRECT, "pd.host.transport": "rdma"}, "LLM_PARAM_INVALID"),
    ],
)
def test_bad_option_fails_init_and_a_second_try_may_succeed(engine, options, status):
    with pytest.raises(LLMException) as failure:
        engine.init(options)
    assert failure.value.status_code is LLMStatusCode[status]
    engine.init(DIRECT)
    assert engine.cache_manager is not None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (None, TypeError),
        ([], TypeError),
        ({**DIRECT, "ge.flowGraphMemMaxSize": 5}, TypeError),
        ({**DIRECT, "llm.listenIpInfo": "127.0.0.1:http"}, ValueError),
        ({}, ModuleNotFoundError),
        ({"llm.EnableCacheManager": "0"}, ModuleNotFoundError),
    ],
)
def test_other_init_errors(engine, options, error):
    with pytest.raises(error):
        engine.init(options)


def test_local_comm_res_turns_direct_mode_on(engine):
    engine.init({"llm.LocalCommRes": ""})
    assert engine.cache_manager is not None


def test_init_does_not_change_the_callers_options(engine):
    options = {"llm.LocalCommRes": ""}
    engine.init(options)
    assert options == {"llm.LocalCommRes": ""}


def test_one_instance_per_process(engine):
    engine.init(DIRECT)
    engine.init(DIRECT)  # the same one: nothing happens
    other = LLMDataDist(LLMRole.DECODER, 2)
    with pytest.raises(LLMException, match="Cannot init multiple") as failure:
        other.init(DIRECT)
    assert failure.value.status_code is LLMStatusCode.LLM_FAILED
    engine.finalize()
    other.init(DIRECT)
    other.finalize()


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.cache_manager,
        lambda engine: engine.kv_cache_manager,
        lambda engine: engine.link_clusters([LLMClusterInfo()]),
        lambda engine: engine.unlink_clusters([LLMClusterInfo()]),
        lambda engine: engine.switch_role(LLMRole.MIX),
        lambda engine: engine.link("a", {1: 0, 2: 1}, ""),
        lambda engine: engine.unlink(1),
        lambda engine: engine.query_register_mem_status(1),
        lambda engine: engine.check_link_status(1),
    ],
)
def test_calls_before_init_and_after_finalize_are_runtime_errors(engine, call):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="llm datadist is not initialized"):
            call(engine)
        engine.init(DIRECT)
        engine.finalize()
    engine.finalize()  # idempotent


def test_cache_manager_fails_after_finalize(engine):
    engine.init(DIRECT)
    manager = engine.cache_manager
    desc = CacheDesc(2, [4, 1 << 19], DataType.DT_INT8)
    cache = manager.register_blocks_cache(desc, [2 << 20, 4 << 20])
    engine.finalize()
    cases = [
        (lambda: manager.register_blocks_cache(desc, [2 << 20, 4 << 20]), LLMStatusCode.LLM_FAILED),
        (lambda: manager.unregister_cache(1), LLMStatusCode.LLM_FAILED),
        (lambda: manager.copy_blocks(cache, {0: [1]}), LLMStatusCode.LLM_PARAM_INVALID),
    ]
    for call, status in cases:
        with pytest.raises(LLMException) as failure:
            call()
        assert failure.value.status_code is status


def test_cache_ids_start_again_after_init(engine):
    desc = CacheDesc(1, [4, 1 << 19], DataType.DT_INT8)
    for _ in range(2):
        engine.init(DIRECT)
        assert [engine.cache_manager.register_blocks_cache(desc, [2 << 20]).cache_id for _ in range(2)] == [1, 2]
        engine.finalize()


def test_finalize_ends_all_threads_and_frees_the_port(engine):
    engine.init(make_options({}))
    port = engine.listen_port
    assert any(thread.name.startswith("datadist") for thread in threading.enumerate())
    engine.finalize()
    assert not any(thread.name.startswith("datadist") for thread in threading.enumerate())
    engine.init({**make_options({}), "llm.listenIpInfo": f"127.0.0.1:{port}"})
    assert engine.listen_port == port


def test_port_0_means_a_free_one(engine):
    engine.init(make_options({}))
    assert datadist.listening_port(engine) > 0
    socket.create_connection(("127.0.0.1", datadist.listening_port(engine))).close()


def test_without_listen_address_nothing_listens(engine):
    engine.init(make_options({"listen": False}))
    assert datadist.listening_port(engine) is None


def test_switch_role_starts_moves_and_stops_listening(engine):
    engine.init(make_options({"listen": False}))
    engine.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:0", "other": "ignored"})
    port = engine.listen_port
    assert port is not None
    engine.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": f"127.0.0.1:{port}"})
    assert engine.listen_port == port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LLMException) as failure:
            engine.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": f"127.0.0.1:{taken.getsockname()[1]}"})
    assert failure.value.status_code is LLMStatusCode.LLM_FAILED
    engine.switch_role(LLMRole.DECODER)
    assert engine.listen_port is None
    with pytest.raises(TypeError):
        engine.switch_role(LLMRole.DECODER, "x")
    with pytest.raises(TypeError):
        engine.switch_role(2)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("", {1: 0, 2: 1}, ""), LLMException),
        (("x" * 128, {1: 0, 2: 1}, ""), LLMException),
        (("x", {1: 0}, ""), LLMException),
        (("x", {1: 0, 2: 1, 3: 2, 4: 3, 5: 4}, ""), LLMException),
        (("x", {1: 1, 2: 0}, ""), LLMException),
        (("x", {1: 0, 2: -1}, ""), ValueError),
        (("x", {-1: 0, 2: 1}, ""), ValueError),
        (("x", {"1": 0, 2: 1}, ""), TypeError),
        (("x", [1, 2], ""), TypeError),
        (("x", {1: 0, 2: 1}, {}), TypeError),
    ],
)
def test_two_sided_link_checks_its_arguments(engine, args, error):
    engine.init(DIRECT)
    with pytest.raises(error):
        engine.link(*args)


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (lambda engine: engine.link("a", {1: 0, 2: 1}, "{}"), "LLM_LINK_FAILED"),
        (lambda engine: engine.unlink(1), "LLM_NOT_YET_LINK"),
        (lambda engine: engine.query_register_mem_status(1), "LLM_NOT_YET_LINK"),
        (lambda engine: engine.kv_cache_manager, "LLM_PARAM_INVALID"),
        (lambda engine: engine.check_link_status(1), "LLM_PARAM_INVALID"),
        (lambda engine: engine.cache_manager.remove_cache_key(CacheKey(1, 1)), "LLM_FEATURE_NOT_ENABLED"),
    ],
)
def test_what_the_host_implementation_lacks_says_so(engine, call, status):
    engine.init(DIRECT)
    with pytest.raises(LLMException) as failure:
        call(engine)
    assert failure.value.status_code is LLMStatusCode[status]


def test_instances_cannot_be_pickled(engine):
    with pytest.raises(TypeError):
        pickle.dumps(engine)


def test_load_prefers_cann_only_with_a_device(monkeypatch):
    fake = types.ModuleType("llm_datadist")
    for name in choose._NAMES:
        setattr(fake, name, f"cann {name}")
    fake.__spec__ = types.SimpleNamespace(name="llm_datadist")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "llm_datadist", fake)
    monkeypatch.setattr(choose, "_DEVICE_FILES", "/nowhere/davinci*")
    assert datadist.load().name == "host"
    assert datadist.load("host").LLMDataDist is LLMDataDist
    monkeypatch.setattr(choose, "_DEVICE_FILES", "/dev/null")
    assert datadist.load().name == "cann"
    assert datadist.load("cann").LLMConfig == "cann LLMConfig"
    assert datadist.load("host").name == "host"


def test_load_of_what_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "llm_datadist", None)
    with pytest.raises(ImportError, match="llm_datadist cannot be imported"):
        datadist.load("cann")
    with pytest.raises(ValueError, match="prefer must be"):
        datadist.load("gpu")


def test_cann_answers_what_only_the_host_knows():
    class Cann:
        pass

    assert datadist.listening_port(Cann()) is None
    assert datadist.link_transport(Cann(), 5) == "cann"
