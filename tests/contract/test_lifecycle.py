# SPDX-License-Identifier: Apache-2.0
"""`LLMDataDist.init`, `finalize` and `switch_role` (datadist-api.md §1.1, §1.4, §4.9)."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import threading

import pytest

from tests.contract.implementation import (
    DIRECT,
    RELEASE,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    count_running_calls,
    differs,
    listening_port,
    only,
    status_of,
)
from tests.unit.datadist.datadist_peer import make_options, pull_status


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
        ({**DIRECT, "ge.flowGraphMemMaxSize": "1,2"}, "LLM_PARAM_INVALID"),
        ({**DIRECT, "ge.exec.deviceId": "0;1"}, "LLM_PARAM_INVALID"),
        ({**DIRECT, "llm.SyncKvCacheWaitTime": "soon"}, "LLM_PARAM_INVALID"),
        ({**DIRECT, "llm.LinkRetryCount": "0"}, "LLM_PARAM_INVALID"),
        ({**DIRECT, "llm.EnableRemoteCacheAccessible": "yes"}, "LLM_FAILED"),
        ({"llm.LocalCommRes": "", "llm.EnableCacheManager": "0"}, "LLM_PARAM_INVALID"),
        ({"llm.TransferBackend": "hixl"}, "LLM_PARAM_INVALID"),  # no cache manager
        ({**DIRECT, "llm.TransferBackend": "hixl"}, "LLM_PARAM_INVALID"),  # no listen address
        ({**DIRECT, "llm.TransferBackend": "x", "llm.listenIpInfo": "127.0.0.1:0"}, "LLM_PARAM_INVALID"),
        pytest.param(
            {**DIRECT, "llm.TransferBackend": "hixl", "llm.listenIpInfo": "127.0.0.1:0"},
            "LLM_FEATURE_NOT_ENABLED",
            marks=only("host", "CANN has that backend from 9.0 on"),
        ),
        ({"llm.EnableCacheManager": "1"}, "LLM_FEATURE_NOT_ENABLED"),  # message mode
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
    assert ("llm.Role" in options) is differs(False, RELEASE < "9.1", "CANN wrote into them until 9.1")


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


def test_port_0_means_a_free_one(engine):
    engine.init(make_options({}))
    assert listening_port(engine) > 0
    socket.create_connection(("127.0.0.1", listening_port(engine))).close()


def test_without_listen_address_nothing_listens(engine):
    engine.init(make_options({"listen": False}))
    assert listening_port(engine) is None


def test_instances_cannot_be_pickled(engine):
    with pytest.raises(TypeError):
        pickle.dumps(engine)


def test_cluster_id_is_known_before_init(engine):
    assert engine.cluster_id == 1
    assert LLMDataDist.llm_engine_instance is None


def test_the_singleton_is_the_initialised_instance(engine):
    engine.init(DIRECT)
    assert LLMDataDist.llm_engine_instance is engine
    engine.finalize()
    assert LLMDataDist.llm_engine_instance is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ge.flowGraphMemMaxSize": 5, "llm.LocalCommRes": "", "llm.EnableCacheManager": "0"}, TypeError),
        ({"llm.EnableCacheManager": "0", "llm.LocalCommRes": ""}, LLMException),  # before the old mode is looked for
        ({"llm.TransferBackend": "hixl", "llm.EnableCacheManager": "1", "llm.listenIpInfo": ""}, LLMException),
        ({**DIRECT, "llm.listenIpInfo": "1:x", "llm.SyncKvCacheWaitTime": "x"}, ValueError),
        ({"llm.EnableCacheManager": "0", "llm.listenIpInfo": "1:x"}, ModuleNotFoundError),  # not parsed in that mode
    ],
)
def test_init_reports_the_first_of_several_faults(engine, options, error):
    with pytest.raises(error):
        engine.init(options)


def test_a_second_instance_is_refused_before_its_options_are_read(engine):
    engine.init(DIRECT)
    with pytest.raises(LLMException, match="Cannot init multiple"):
        LLMDataDist(LLMRole.MIX, 2).init(None)


@pytest.mark.parametrize("option", ["llm.MemPoolConfig", "llm.HostMemPoolConfig"])
@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("{", "LLM_PARAM_INVALID"),
        ("[]", "LLM_PARAM_INVALID"),
        ("{}", "LLM_PARAM_INVALID"),
        ('{"memory_size": -1}', "LLM_PARAM_INVALID"),
        ('{"memory_size": "65536"}', "LLM_PARAM_INVALID"),
        ('{"memory_size": true}', "LLM_PARAM_INVALID"),
        ('{"memory_size": 65535}', "LLM_PARAM_INVALID"),  # less than a page
        ('{"memory_size": 65536, "page_shift": 9}', "LLM_PARAM_INVALID"),
        ('{"memory_size": 4294967296, "page_shift": 31}', "LLM_PARAM_INVALID"),
        ('{"memory_size": 65536, "page_size": 16}', "LLM_PARAM_INVALID"),
        ('{"memory_size": 1152921504606846976}', "LLM_OUT_OF_MEMORY"),
    ],
)
def test_bad_pool_fails_init(engine, option, text, status):
    assert status_of(lambda: engine.init({**DIRECT, option: text})) == status
    engine.init({**DIRECT, option: '{"memory_size": 65536}'})


def test_listening_on_a_taken_port_fails_init(engine):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = {**DIRECT, "llm.listenIpInfo": f"127.0.0.1:{taken.getsockname()[1]}"}
        assert status_of(lambda: engine.init(options)) == "LLM_FAILED"


def test_exit_finalises_a_live_engine():
    code = (
        "from tests.contract.implementation import DIRECT, LLMDataDist, LLMRole\n"
        "class Loud(LLMDataDist):\n"
        "    def finalize(self):\n"
        "        super().finalize()\n"
        "        print('finalised')\n"
        "Loud(LLMRole.MIX, 1).init(DIRECT)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout == "finalised\n"


def test_finalize_waits_for_running_calls(make_node, make_peer):
    peer = make_peer(transport="tcp")
    node = make_node(timeout_ms=400)
    node.link(2, peer.port)
    peer.freeze()
    results = []
    thread = threading.Thread(target=lambda: results.append(pull_status(node, 2, [1], [1]).name))
    thread.start()
    while not count_running_calls(node.datadist):
        thread.join(0.001)
    node.datadist.finalize()
    thread.join()
    assert results == ["LLM_TIMEOUT"]


def test_switch_role_starts_moves_and_stops_listening(engine):
    engine.init(make_options({"listen": False}))
    engine.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:0", "other": "ignored"})
    port = listening_port(engine)
    assert port is not None
    engine.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": f"127.0.0.1:{port}"})
    assert listening_port(engine) == port
    engine.switch_role(LLMRole.DECODER)
    assert listening_port(engine) is None
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


def test_switch_role_to_a_taken_port_fails(engine):
    engine.init(make_options({"listen": False}))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = {"llm.listenIpInfo": f"127.0.0.1:{taken.getsockname()[1]}"}
        assert status_of(lambda: engine.switch_role(LLMRole.PROMPT, address)) == "LLM_FAILED"


def test_switch_role_checks_its_arguments(engine):
    engine.init(DIRECT)
    for args in [(LLMRole.DECODER, "x"), (2,), (None,)]:
        with pytest.raises(TypeError):
            engine.switch_role(*args)
    engine.switch_role(LLMRole.PROMPT)  # the role that it has


@pytest.mark.parametrize("call", [lambda engine: engine.kv_cache_manager, lambda engine: engine.check_link_status(1)])
def test_calls_of_the_old_mode_are_invalid(engine, call):
    engine.init(DIRECT)
    assert status_of(lambda: call(engine)) == "LLM_PARAM_INVALID"


def test_finalize_frees_the_port(engine):
    engine.init(make_options({}))
    port = listening_port(engine)
    engine.finalize()
    engine.init({**make_options({}), "llm.listenIpInfo": f"127.0.0.1:{port}"})
    assert listening_port(engine) == port
