# SPDX-License-Identifier: Apache-2.0
"""A running instance as the peer: an HTTP server that answers as one does, beside a real control server."""

from __future__ import annotations

import http.server
import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_ascend_pd.control.server import ControlServer, Reply
from vllm_ascend_pd.doctor.check import Check, State
from vllm_ascend_pd.doctor.peer import facts as host_facts
from vllm_ascend_pd.doctor.peer.instance import InstanceVisit, visit_instance
from vllm_ascend_pd.handshake import compare
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.wire import WIRE_VERSION, Hello, Refused

SECRET = Secret(b"a secret of a deployment")
RECORD = {
    "wire_version": WIRE_VERSION,
    "vllm_version": "0.32.0+pd.1.cpu",
    "fork_version": "1",
    "model_config": {"x": 1},
}
FACTS = {name: value for name, value in RECORD.items() if name != "model_config"}


class Instance:
    """What of a prefill instance the doctor touches."""

    def __init__(self, folder: str) -> None:
        self.hellos: list[Hello] = []
        self.control = ControlServer(f"{folder}/core.sock", "tcp://127.0.0.1:0", SECRET, {Hello: self._on_hello})
        self.control.start()
        self.rank = socket.create_server(("127.0.0.1", 0))
        self.status: dict[str, Any] = {
            "role": "prefill",
            "engine_id": "pd-1",
            "control": {"host": "127.0.0.1", "port": self.control.peer_port},
            "links": [{"tp_rank": 0, "host": "127.0.0.1", "port": self.rank.getsockname()[1]}],
        }
        self.codes = {"/pd/status": 200, "/health": 200}
        instance = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = json.dumps(instance.status if self.path == "/pd/status" else {"problems": ["a thread died"]})
                self.send_response(instance.codes.get(self.path, 404))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def _on_hello(self, message: Hello, reply: Reply) -> None:
        """As the prefill half: the first difference."""
        self.hellos.append(message)
        first = compare(RECORD, message.record)[0]
        reply.send(Refused(code="handshake", message="", field=first.field, ours=first.ours, theirs=first.theirs))

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.rank.close()
        self.control.close()


@pytest.fixture
def instance() -> Iterator[Instance]:
    with tempfile.TemporaryDirectory(prefix="pd") as folder:
        running = Instance(folder)
        yield running
        running.close()


def visit(url: str, secret: Secret | None = SECRET, **facts: Any) -> dict[str, Check]:
    checks = list(visit_instance(InstanceVisit(url, secret, {**FACTS, **facts}, 2.0)))
    return {check.key: check for check in checks}


def states(found: dict[str, Check]) -> dict[str, State]:
    return {key: check.state for key, check in found.items()}


def test_a_prefill_instance_is_reached_on_all_its_ports_and_shares_secret_and_versions(instance: Instance):
    found = visit(instance.url)
    assert states(found) == {
        "peer.reachable": State.OK,
        "peer.health": State.OK,
        "peer.control-plane": State.OK,
        "peer.secret": State.OK,
        "peer.versions": State.OK,
        "peer.data-plane": State.OK,
        "peer.dial-back": State.NOT_APPLICABLE,
        "transfer.from-peer": State.NOT_APPLICABLE,
    }
    assert "vllm pd doctor --listen" in found["transfer.from-peer"].seen
    assert [hello.engine_id for hello in instance.hellos] == ["pd-doctor"]  # what its log will say


@pytest.mark.parametrize("field", ["vllm_version", "fork_version"])
def test_another_version_is_named_with_both_values(instance: Instance, field: str):
    check = visit(instance.url, **{field: "other"})["peer.versions"]
    assert check.state is State.FAIL
    assert f"{field} is other here and {RECORD[field]} there" in check.seen


def test_another_secret_fails(instance: Instance):
    found = visit(instance.url, Secret(b"quite another secret"))
    assert found["peer.secret"].state is State.FAIL
    assert not instance.hellos
    found = visit(instance.url, None)
    assert found["peer.secret"].state is State.NOT_APPLICABLE


def test_a_rank_that_cannot_be_reached_is_named(instance: Instance):
    instance.rank.close()
    check = visit(instance.url)["peer.data-plane"]
    assert check.state is State.FAIL
    assert f"rank 0 at 127.0.0.1:{instance.status['links'][0]['port']}: refused" in check.seen
    instance.status["links"] = []
    assert visit(instance.url)["peer.data-plane"].state is State.WARN


def test_an_announced_loopback_address_is_no_address_for_others(instance: Instance, monkeypatch):
    monkeypatch.setattr("vllm_ascend_pd.doctor.peer.instance.is_loopback", lambda host: host != "p1")
    monkeypatch.setattr("vllm_ascend_pd.doctor.peer.instance.urlsplit", lambda _: type("U", (), {"hostname": "p1"}))
    found = visit(instance.url)
    assert found["peer.control-plane"].state is State.FAIL
    assert "--pd-listen" in found["peer.control-plane"].todo
    assert "peer.secret" not in found


def test_a_control_plane_behind_a_firewall_fails(instance: Instance):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        instance.status["control"]["port"] = unused.getsockname()[1]
    found = visit(instance.url)
    assert found["peer.control-plane"].state is State.FAIL
    assert "refused" in found["peer.control-plane"].seen


def test_a_decode_instance_is_not_dialled(instance: Instance):
    instance.status = {"role": "decode", "engine_id": "pd-2"}
    found = visit(instance.url)
    assert found["peer.control-plane"].state is State.NOT_APPLICABLE
    assert not instance.hellos


def test_an_unhealthy_instance_fails_with_its_problems(instance: Instance):
    instance.codes["/health"] = 503
    check = visit(instance.url)["peer.health"]
    assert check.state is State.FAIL
    assert "a thread died" in check.seen


@pytest.mark.parametrize(("code", "word"), [(404, "without --pd-role"), (503, "answers 503"), (500, "answers 500")])
def test_what_is_no_healthy_instance_ends_the_visit(instance: Instance, code: int, word: str):
    instance.codes["/pd/status"] = code
    found = visit(instance.url)
    assert states(found) == {"peer.reachable": State.FAIL}
    assert word in f"{found['peer.reachable'].seen} {found['peer.reachable'].todo}"


def test_an_address_of_the_control_plane_is_recognised(instance: Instance):
    found = visit(f"http://127.0.0.1:{instance.control.peer_port}")
    assert "give --peer 127.0.0.1:" in found["peer.reachable"].seen


def test_an_instance_that_is_away_fails(instance: Instance):
    instance.http.shutdown()
    instance.http.server_close()
    assert "refused" in visit(instance.url)["peer.reachable"].seen


class TestFacts:
    """What two doctors compare."""

    NPU = {
        "data_plane": "cann",
        "environment": {"HCCL_INTRA_ROCE_ENABLE": "1", "HCCL_RDMA_TC": "132"},
        "tls": {"0": False, "1": False},
        "boot_id": "one",
        "network_namespace": "net:[1]",
    }

    def told(self, **theirs: Any) -> dict[str, Check]:
        return {check.key: check for check in host_facts.compare(self.NPU, {**self.NPU, **theirs})}

    def test_alike_is_ok(self):
        assert {check.state for check in self.told().values()} == {State.OK}
        assert set(self.told()) == {"peer.versions", "peer.machine", "peer.environment", "peer.tls-switch"}

    def test_what_the_handshake_refuses_fails_and_the_rest_warns(self):
        check = self.told(byte_order="big")["peer.versions"]
        assert (check.state, "byte_order is (absent) here and big there" in check.seen) == (State.FAIL, True)
        check = self.told(torch="2.9.0")["peer.versions"]
        assert (check.state, "torch is (absent) here and 2.9.0 there" in check.seen) == (State.WARN, True)
        assert self.told(cann="(unknown)")["peer.versions"].state is State.OK

    def test_variables_that_the_handshake_compares_fail_and_others_warn(self):
        check = self.told(environment={"HCCL_INTRA_ROCE_ENABLE": "0"})["peer.environment"]
        assert (check.state, "HCCL_INTRA_ROCE_ENABLE is 1 here and 0 there" in check.seen) == (State.FAIL, True)
        alike = {"HCCL_INTRA_ROCE_ENABLE": "1"}  # HCCL_RDMA_TC: what we set is the default
        assert self.told(environment=alike)["peer.environment"].state is State.OK
        check = self.told(environment={**alike, "HCCL_RDMA_TIMEOUT": "18"})["peer.environment"]
        assert (check.state, "HCCL_RDMA_TIMEOUT is (absent) here and 18 there" in check.seen) == (State.WARN, True)
        assert self.told(environment={**alike, "HCCL_IF_IP": "10.0.0.1"})["peer.environment"].state is State.OK

    @pytest.mark.parametrize(
        ("tls", "state"),
        [({"0": True}, State.FAIL), ({}, State.WARN), ({"0": None}, State.WARN), ({"4": False}, State.OK)],
    )
    def test_the_tls_switch_must_agree(self, tls: dict[str, Any], state: State):
        assert self.told(tls=tls)["peer.tls-switch"].state is state

    def test_one_machine_in_two_network_namespaces_is_warned_about(self):
        assert "another machine" in self.told(boot_id="two")["peer.machine"].seen
        assert "can be mapped" in self.told()["peer.machine"].seen
        check = self.told(network_namespace="net:[2]")["peer.machine"]
        assert (check.state, "TCP" in check.seen) == (State.WARN, True)
