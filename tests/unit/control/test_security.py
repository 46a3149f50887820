# SPDX-License-Identifier: Apache-2.0
"""What a hostile or broken peer can send to a control server: refused, counted, and never executed."""

from __future__ import annotations

import os
import pickle
import re
import socket
import time
from pathlib import Path

import msgspec
import pytest
import zmq

import vllm_ascend_pd
from tests.unit.control.conftest import SECRET, peer_address
from vllm_ascend_pd.control import zap
from vllm_ascend_pd.control.client import ControlClient
from vllm_ascend_pd.control.endpoint import set_client_curve
from vllm_ascend_pd.wire import MAX_FRAME_BYTES, Ack, CancelTransfer, HealthQuery, HealthReply

REQUEST_ID = b"12345678"


@pytest.fixture
def raw():
    """A DEALER without any manners; `raw(endpoint, secret)`."""
    context = zmq.Context()
    opened = []

    def make(endpoint, secret=None, client_keys=None):
        sock = context.socket(zmq.DEALER)
        opened.append(sock)
        sock.linger = 0
        sock.rcvtimeo = 3000
        if secret is not None:
            set_client_curve(sock, secret)
        if client_keys is not None:
            sock.curve_publickey, sock.curve_secretkey = client_keys
        sock.connect(endpoint)
        return sock

    yield make
    for sock in opened:
        sock.close(0)
    context.term()


def wait_for(condition, what):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


class Canary:
    """Unpickling this creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("plane", ["local", "peer"])
def test_a_pickled_object_is_refused_counted_and_not_executed(servers, raw, tmp_path, plane):
    """F72: the canary must not appear."""
    server = servers.start()
    canary = tmp_path / "canary"
    sock = raw(servers.local()) if plane == "local" else raw(peer_address(server), SECRET)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        sock.send_multipart([REQUEST_ID, pickle.dumps(Canary(canary), protocol)])
        request_id, payload = sock.recv_multipart()
        assert request_id == REQUEST_ID
        assert msgspec.msgpack.decode(payload)["code"] == "malformed"
    assert server.counters[f"{plane}_malformed"] == pickle.HIGHEST_PROTOCOL + 1
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists(), "the canary works, so its absence above proves something"


def test_the_package_never_unpickles_or_evaluates():
    """F72: no pickle, eval or pyobj anywhere in our package."""
    forbidden = re.compile(r"^\s*(import|from) (pickle|cloudpickle|marshal|shelve)\b|_pyobj\(|\beval\(|\bexec\(", re.M)
    root = Path(vllm_ascend_pd.__file__).parent
    found = [path for path in root.rglob("*.py") if forbidden.search(path.read_text(encoding="utf-8"))]
    assert found == []


GARBAGE = {
    "empty": b"",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(1000),
    "unknown tag": msgspec.msgpack.encode({"type": "shutdown"}),
    "no tag": msgspec.msgpack.encode({"request_id": "r"}),
    "tag of a wrong type": msgspec.msgpack.encode({"type": 7}),
    "missing field": msgspec.msgpack.encode({"type": "deliver"}),
    "wrong type of a field": msgspec.msgpack.encode({"type": "cancel", "transfer_id": 5}),
    "deep nesting": b"\x91" * 100_000 + b"\x00",
    "deep nesting in a free field": msgspec.msgpack.encode({"type": "hello", "wire_version": 1, "engine_id": "e"})
    + b"\x91" * 50_000,
    "array length that lies": b"\xdd\xff\xff\xff\xff",
    "trailing bytes": msgspec.msgpack.encode({"type": "health"}) + b"x",
}


@pytest.mark.parametrize("plane", ["local", "peer"])
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_refused_and_counted(servers, raw, plane, kind):
    server = servers.start()
    sock = raw(servers.local()) if plane == "local" else raw(peer_address(server), SECRET)
    sock.send_multipart([REQUEST_ID, GARBAGE[kind]])
    assert msgspec.msgpack.decode(sock.recv_multipart()[1])["code"] == "malformed"
    assert server.counters["malformed"] == 1
    assert server.alive()


def test_free_fields_cannot_nest_without_end(servers, raw):
    server = servers.start()
    sock = raw(peer_address(server), SECRET)
    head = msgspec.msgpack.encode({"type": "hello", "wire_version": 1, "engine_id": "e", "epoch": "x"})
    # One more entry in the map: "record": {"a": [[[[...]]]]}
    payload = bytes([head[0] + 1]) + head[1:] + b"\xa6record\x81\xa1a" + b"\x91" * 200_000 + b"\x00"
    sock.send_multipart([REQUEST_ID, payload])
    assert msgspec.msgpack.decode(sock.recv_multipart()[1])["code"] == "malformed"
    assert server.alive()


@pytest.mark.parametrize("frames", [[b""], [b"short", b"x"], [REQUEST_ID], [REQUEST_ID, b"x", b"y"], [b"x"] * 50])
def test_wrong_framing_is_counted_and_not_answered(servers, raw, frames):
    server = servers.start()
    sock = raw(servers.local())
    sock.send_multipart(frames)
    wait_for(lambda: server.counters["malformed"] == 1, "the frame was not counted")
    sock.rcvtimeo = 50
    with pytest.raises(zmq.Again):
        sock.recv_multipart()


@pytest.mark.parametrize("plane", ["local", "peer"])
def test_an_oversize_frame_never_reaches_the_decoder_and_others_are_served(servers, raw, plane):
    server = servers.start()
    endpoint = servers.local() if plane == "local" else peer_address(server)
    message = HealthQuery() if plane == "local" else CancelTransfer(transfer_id="t")
    sock = raw(endpoint, None if plane == "local" else SECRET)
    sock.send_multipart([REQUEST_ID, msgspec.msgpack.encode(message)])
    sock.recv_multipart()
    before = dict(server.counters)
    sock.send_multipart([REQUEST_ID, b"x" * (MAX_FRAME_BYTES + 1024)])
    sock.rcvtimeo = 300
    with pytest.raises(zmq.Again):
        sock.recv_multipart()
    assert server.counters["malformed"] == 0
    assert server.counters[f"{plane}_requests"] == before[f"{plane}_requests"]
    client = ControlClient(endpoint, SECRET)
    assert client.request(message, 5, 2) in (HealthReply(), Ack())
    client.close()


def test_the_servers_public_key_is_not_enough(servers, raw):
    """A client that knows the server's key but has a key of its own is stopped by the gate and counted."""
    server = servers.start()
    sock = raw(peer_address(server), SECRET, client_keys=zmq.curve_keypair())
    sock.send_multipart([REQUEST_ID, msgspec.msgpack.encode(CancelTransfer(transfer_id="t"))])
    wait_for(lambda: server.counters["denied"] >= 1, "the gate was not asked")
    assert server.counters["admitted"] == server.counters["peer_requests"] == 0


def test_without_a_working_gate_nobody_gets_in(servers, raw, monkeypatch):
    monkeypatch.setattr(zap, "ZAP_ENDPOINT", "inproc://elsewhere")
    server = servers.start()
    sock = raw(peer_address(server), SECRET)
    sock.rcvtimeo = 500
    sock.send_multipart([REQUEST_ID, msgspec.msgpack.encode(CancelTransfer(transfer_id="t"))])
    with pytest.raises(zmq.Again):
        sock.recv_multipart()
    assert server.counters["peer_requests"] == 0


def test_a_client_without_curve_gets_nothing_from_the_peer_plane(servers, raw):
    server = servers.start()
    sock = raw(peer_address(server))
    sock.rcvtimeo = 300
    sock.send_multipart([REQUEST_ID, msgspec.msgpack.encode(CancelTransfer(transfer_id="t"))])
    with pytest.raises(zmq.Again):
        sock.recv_multipart()
    assert server.counters["peer_requests"] == 0


def test_plain_bytes_on_the_peer_port_do_no_harm(servers):
    server = servers.start()
    for noise in (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00", bytes(4096), b"\xff" * 64):
        with socket.create_connection(("127.0.0.1", server.peer_port), 2) as plain:
            plain.sendall(noise)
    client = ControlClient(peer_address(server), SECRET)
    assert client.request(CancelTransfer(transfer_id="t"), 5, 2) == Ack()
    client.close()
    assert server.alive()


def test_a_client_refuses_a_server_that_lacks_the_secret(servers, raw):
    """The other direction: somebody who took the prefill port learns nothing and is not believed."""
    context = zmq.Context()
    impostor = context.socket(zmq.ROUTER)
    impostor.linger = 0
    public_key, secret_key = zmq.curve_keypair()
    impostor.curve_server, impostor.curve_publickey, impostor.curve_secretkey = True, public_key, secret_key
    port = impostor.bind_to_random_port("tcp://127.0.0.1")
    sock = raw(f"tcp://127.0.0.1:{port}", SECRET)
    sock.send_multipart([REQUEST_ID, b"private"])
    assert not impostor.poll(300)
    impostor.close(0)
    context.term()
