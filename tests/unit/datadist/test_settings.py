# SPDX-License-Identifier: Apache-2.0
"""How a rank starts its data plane: options of each way, ports, devices of threads, memory to leave free."""

from __future__ import annotations

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from vllm_ascend_pd import datadist
from vllm_ascend_pd.control.server import ControlServer
from vllm_ascend_pd.datadist import DataPlaneSettings, Way, ports, settings
from vllm_ascend_pd.datadist.ports import TAKEN_BY_CANN, allowed_ports, bind_first, candidates, is_free
from vllm_ascend_pd.datadist.status import LLMException, LLMStatusCode
from vllm_ascend_pd.errors import PDConfigError, PDPortTakenError
from vllm_ascend_pd.secret import Secret

HOST = datadist.load("host")
CANN = SimpleNamespace(name="cann", LLMConfig=HOST.LLMConfig, LLMException=LLMException)


def make(way: Way, *, is_prefill: bool = True, **values) -> DataPlaneSettings:
    return DataPlaneSettings(is_prefill=is_prefill, host="10.0.0.1", way=way, sync_timeout_ms=700, **values)


COMMON = {
    "llm.MemoryUtilization": "0.95",
    "ge.exec.deviceId": "3",
    "ge.session_device_id": "3",
    "llm.EnableCacheManager": "1",
    "llm.EnableRemoteCacheAccessible": "1",
    "llm.SyncKvCacheWaitTime": "700",
}
SECRET = {"pd.host.secret": "ab", "pd.host.transport": "tcp"}
COMM_RES = {"llm.LocalCommRes": ""}
HIXL = {**COMM_RES, "llm.TransferBackend": "hixl"}


@pytest.mark.parametrize(
    ("way", "is_prefill", "port", "expected"),
    [
        (Way.HOST, True, 0, {**SECRET, "llm.listenIpInfo": "10.0.0.1:0"}),
        (Way.HOST, False, 0, SECRET),
        (Way.HIXL, True, 18005, {**HIXL, "llm.listenIpInfo": "10.0.0.1:18005"}),
        (Way.HIXL, False, 0, {**HIXL, "llm.listenIpInfo": "10.0.0.1:0"}),
        (Way.COMM_RES, True, 18005, {**COMM_RES, "llm.listenIpInfo": "10.0.0.1:18005"}),
        (Way.COMM_RES, False, 0, COMM_RES),
        (Way.TWO_SIDED, True, 0, {"llm.LinkTotalTime": "20"}),
        (Way.TWO_SIDED, False, 0, {"llm.LinkTotalTime": "20"}),
    ],
)
def test_each_way_has_its_options(way, is_prefill, port, expected):
    given = make(way, is_prefill=is_prefill, device_index=3, secret_hex="ab", host_transport="tcp")
    assert datadist.build_options(HOST, given, port) == {**COMMON, **expected}


class Engine:
    """Takes options; `errors` by port."""

    def __init__(self, errors=None) -> None:
        self.errors = errors or {}
        self.tried: list[int] = []

    def init(self, options) -> None:
        port = int(options.get("llm.listenIpInfo", ":0").rpartition(":")[2])
        self.tried.append(port)
        if port in self.errors:
            raise LLMException("x", status_code=LLMStatusCode[self.errors[port]])


def test_taken_ports_are_passed_over():
    engine = Engine()
    assert datadist.start(CANN, engine, make(Way.HIXL), lambda _, port: port >= 18002) == 18002
    assert engine.tried == [18002]


def test_a_port_that_another_rank_was_quicker_to_take_is_passed_over():
    taken = set()

    def can_bind(_host, port):
        return port not in taken

    class Late(Engine):
        def init(self, options):
            super_error = len(self.tried) == 0
            super().init(options)
            if super_error:
                taken.add(self.tried[-1])
                raise LLMException("bind", status_code=LLMStatusCode.LLM_FAILED)

    engine = Late()
    assert datadist.start(CANN, engine, make(Way.COMM_RES), can_bind) == 18001
    assert engine.tried == [18000, 18001]


@pytest.mark.parametrize("code", ["LLM_FAILED", "LLM_PARAM_INVALID"])
def test_another_failure_of_the_start_is_not_hidden(code):
    engine = Engine({18000: code})
    with pytest.raises(LLMException):
        datadist.start(CANN, engine, make(Way.HIXL), lambda *_: True)
    assert engine.tried == [18000]


@pytest.mark.parametrize(("way", "is_prefill"), [(Way.TWO_SIDED, True), (Way.COMM_RES, False), (Way.HIXL, False)])
def test_who_is_not_dialled_has_no_port(way, is_prefill):
    engine = Engine()
    assert datadist.start(CANN, engine, make(way, is_prefill=is_prefill)) == 0
    assert engine.tried == [0]


def test_no_port_at_all_is_refused_by_flag():
    with pytest.raises(PDConfigError, match="--pd-listen: no free port for the data plane on 10.0.0.1"):
        datadist.start(CANN, Engine(), make(Way.HIXL), lambda *_: False)


def test_the_host_engine_tells_the_port_that_it_got():
    engine = SimpleNamespace(init=lambda options: None, listen_port=4711)
    assert datadist.start(HOST, engine, make(Way.HOST)) == 4711


# ---------------------------------------------------------------- ports


def test_default_ports_end_before_those_of_cann_and_the_ephemeral_ones():
    assert set(allowed_ports(0)).isdisjoint(TAKEN_BY_CANN)
    assert max(allowed_ports(0)) < 32768


@pytest.mark.parametrize(
    ("port", "is_allowed"), [(19799, True), (19800, False), (20500, False), (35999, False), (36000, True)]
)
def test_a_listen_port_near_canns_is_refused(port, is_allowed):
    if is_allowed:
        assert set(allowed_ports(port)) == set(range(port + 1, port + 201))
    else:
        with pytest.raises(PDConfigError, match=f"--pd-listen: port {port}.*20000 to 35999"):
            allowed_ports(port)


def test_a_port_with_none_after_it_is_refused_by_name():
    with pytest.raises(PDConfigError, match="--pd-listen: port 65535.*there are none"):
        bind_first(int, "127.0.0.1", 65535)
    assert list(allowed_ports(65534)) == [65535]


def test_ranks_begin_apart_and_try_every_port_once():
    first = [next(candidates(0, rank)) for rank in range(16)]
    assert len(set(first)) == 16
    assert sorted(candidates(0, 7)) == list(allowed_ports(0))
    assert sorted(candidates(100, 1000)) == list(range(101, 301))


def test_a_port_is_free_when_it_can_be_bound():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        assert not is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)


def test_the_first_port_that_can_be_bound_is_kept_and_what_is_wrong_is_said():
    def bind_the_last(port):
        if port != 19999:
            raise PDPortTakenError("taken")
        return port

    assert bind_first(bind_the_last, "h") == 19999
    with pytest.raises(PDConfigError, match="no free port on h from 101 to 300"):
        bind_first(bind_the_last, "h", 100)

    def not_ours(_):
        raise PDConfigError("this machine has no such address")

    with pytest.raises(PDConfigError, match="no such address"):
        bind_first(not_ours, "h")
    assert ports.STEP > 1


def test_servers_that_start_at_the_same_moment_get_ports_of_their_own(tmp_path):
    def serve(number):
        def bind(port):
            server = ControlServer(str(tmp_path / f"{number}.sock"), f"tcp://127.0.0.1:{port}", Secret(b"s" * 32), {})
            server.start()
            return server

        return bind_first(bind, "127.0.0.1")

    with ThreadPoolExecutor(8) as pool:
        servers = list(pool.map(serve, range(8)))
    try:
        assert len({server.peer_port for server in servers}) == 8
    finally:
        for server in servers:
            server.close()


# ---------------------------------------------------------------- devices and memory


def test_a_thread_is_bound_to_its_device(monkeypatch):
    bound = []
    fake = SimpleNamespace(npu=SimpleNamespace(set_device=bound.append))
    monkeypatch.setitem(sys.modules, "torch", fake)
    datadist.bind_thread(HOST, 3)
    assert bound == []
    datadist.bind_thread(CANN, 3)
    assert bound == [3]
    del fake.npu
    with pytest.raises(PDConfigError, match="torch_npu is not imported"):
        datadist.bind_thread(CANN, 3)


def test_links_need_device_memory_only_on_devices():
    assert datadist.link_reserve_bytes(HOST, 100) == 0
    one, two = (datadist.link_reserve_bytes(CANN, count) for count in (1, 2))
    assert two - one == settings.LINK_RESERVE_BYTES >= 7_000_000
