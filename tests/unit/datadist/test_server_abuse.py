# SPDX-License-Identifier: Apache-2.0
"""The listener under bad input: counted, dropped, and still serving afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time

import msgspec
import pytest

from tests.unit.datadist.datadist_peer import SECRET
from vllm_ascend_pd.datadist.host import channel, server
from vllm_ascend_pd.datadist.host.framing import MAGIC, configure, receive_frame, send_frame
from vllm_ascend_pd.datadist.host.messages import PROTOCOL, Connect, ConnectReply, Hello, Proof, Ready, encode
from vllm_ascend_pd.datadist.status import LLMStatusCode

KEY = bytes.fromhex(SECRET)


def soon() -> float:
    return time.monotonic() + 5


def frame(body: bytes, magic: int = MAGIC, size: int | None = None) -> bytes:
    return struct.pack("<II", magic, len(body) if size is None else size) + body


def hello(**changes) -> bytes:
    return encode(Hello(**{"protocol": PROTOCOL, "purpose": "link", "nonce": bytes(32), **changes}))


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("data", "counter"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "bad_frames"),
        (frame(b"x", magic=0xA4B3C2D1), "bad_frames"),
        (frame(b"", size=0xFFFFFFFF), "bad_frames"),
        (frame(b"", size=5000), "bad_frames"),  # more than a greeting needs
        (frame(random.Random(1).randbytes(64)), "bad_frames"),
        (frame(b"\x91" * 4000), "bad_frames"),  # deeply nested
        (frame(msgspec.msgpack.encode({"type": "exec", "code": "1"})), "bad_frames"),
        (frame(encode(Ready())), "bad_frames"),
        (frame(hello(protocol=1)), "bad_frames"),
        (frame(hello(nonce=b"short")), "bad_frames"),
        (frame(hello())[:20], "ended_early"),
        (b"", "ended_early"),
        (frame(hello()) + frame(encode(Proof(proof=bytes(32)))), "not_authenticated"),
        (frame(hello()) + frame(hello()), "bad_frames"),
    ],
)
def test_bad_input_is_counted_and_the_next_peer_is_served(make_node, make_peer, data, counter):
    node = make_node(listen=True)
    counters = node.datadist._engine.counters
    with socket.create_connection(("127.0.0.1", node.port)) as sock:
        with contextlib.suppress(OSError):  # it may have hung up in the meantime
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        wait_until(lambda: getattr(counters, counter) == 1)
        sock.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):  # what it answers ends
                pass
    assert counters.greeted == 0
    with socket.create_connection(("127.0.0.1", node.port)) as sock:
        configure(sock)
        channel.dial(sock, KEY, "unlink", b"", soon())


def test_silent_and_dribbling_connections_are_cut(make_node, monkeypatch):
    monkeypatch.setattr(server, "GREETING_S", 0.2)
    node = make_node(listen=True)
    counters = node.datadist._engine.counters
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection(("127.0.0.1", node.port))) for _ in range(4)]
        socks[1].sendall(frame(hello())[:5])
        socks[2].sendall(frame(hello())[:20])
        socks[3].sendall(frame(hello()))
        wait_until(lambda: counters.timeouts == 4)


def test_too_many_connections_that_do_not_greet_are_refused(make_node, monkeypatch):
    monkeypatch.setattr(server, "_MAX_GREETING", 3)
    node = make_node(listen=True)
    counters = node.datadist._engine.counters
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(socket.create_connection(("127.0.0.1", node.port)))
        wait_until(lambda: counters.refused_busy == 2)
    wait_until(lambda: counters.ended_early == 3)


@pytest.mark.parametrize("purpose", ["data", "reverse", "arenas", "shell"])
def test_channels_without_a_link_are_refused(make_node, purpose):
    node = make_node(listen=True)
    counters = node.datadist._engine.counters
    with socket.create_connection(("127.0.0.1", node.port)) as sock:
        configure(sock)
        channel.dial(sock, KEY, purpose, b"guessed", soon())
        wait_until(lambda: counters.bad_frames == 1)


def dial(node) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", node.port))
    configure(sock)
    channel.dial(sock, KEY, "link", b"", soon())
    return sock


def connect(sock, **changes):
    message = {
        "cluster_id": 5,
        "instance": b"other",
        "force": True,
        "remote_accessible": True,
        "transport": "tcp",
        "boot_id": "",
        "caches": [],
        "connections": 1,
    }
    channel.send_message(sock, Connect(**{**message, **changes}), soon())
    return channel.receive_message(sock, ConnectReply, soon())


def test_peer_in_message_mode_is_refused(make_node):
    node = make_node(listen=True)
    with dial(node) as sock:
        reply = connect(sock, remote_accessible=False)
    assert reply.status == LLMStatusCode.LLM_PARAM_INVALID
    assert "enable_remote_cache_accessible" in reply.reason


def establish(node, sock, **changes) -> None:
    """Our raw end of a link becomes one whose peer may say anything."""
    reply = connect(sock, **changes)
    with socket.create_connection(("127.0.0.1", node.port)) as reverse:
        configure(reverse)
        channel.dial(reverse, KEY, "reverse", reply.link_token, soon())
        channel.send_message(sock, Ready(), soon())
        assert channel.receive_message(sock, Ready, soon()).status == 0


@pytest.fixture
def established(make_node):
    """(node, our raw end of a link to it): an authenticated peer that may say anything."""
    node = make_node(listen=True, timeout_ms=300)
    with dial(node) as sock:
        establish(node, sock)
        yield node, sock


READ, WRITE, REPLY, BYE = 1, 2, 3, 4
PLANE_MAGIC = 0x32444450


def plane_frame(kind: int, body: bytes = b"", magic: int = PLANE_MAGIC, size: int | None = None) -> bytes:
    return struct.pack("<IIII", magic, kind, len(body) if size is None else size, 7) + body


def ask(kind: int, **changes) -> bytes:
    """A request for the first 8 bytes of the first tensor."""
    fields = {"cache_id": 1, "first": 0, "count": 8, "start": 0, "stop": 1, "runs": [(0, 8, 1, 0)], "num_runs": None}
    fields.update(changes)
    runs = fields["runs"]
    num_runs = len(runs) if fields["num_runs"] is None else fields["num_runs"]
    words = fields["cache_id"], fields["first"], fields["count"], fields["start"], fields["stop"], num_runs
    body = struct.pack("<qQQIIII", *words, 0) + b"".join(struct.pack("<QQQq", *run) for run in runs)
    return plane_frame(kind, body)


def receive_exactly(sock, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("the end")
        data += more
    return data


def receive_reply(sock) -> tuple[int, int]:
    """(status, number of bytes) of the answer."""
    sock.settimeout(5)
    magic, kind, size, sequence = struct.unpack("<IIII", receive_exactly(sock, 16))
    assert (magic, kind, sequence) == (PLANE_MAGIC, REPLY, 7)
    count, status, reason = struct.unpack("<QII", receive_exactly(sock, 16))
    assert size == 16 + reason
    receive_exactly(sock, reason)
    return status, count


MIB = 1 << 20


@pytest.mark.parametrize("kind", [READ, WRITE])
@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"cache_id": 2}, "LLM_KV_CACHE_NOT_EXIST"),
        ({"cache_id": -1}, "LLM_KV_CACHE_NOT_EXIST"),
        ({"stop": 5}, "LLM_PARAM_INVALID"),
        ({"start": 1}, "LLM_PARAM_INVALID"),
        ({"start": 2**32 - 1}, "LLM_PARAM_INVALID"),
        ({"runs": []}, "LLM_PARAM_INVALID"),
        ({"runs": [(2**64 - 8, 8, 1, 0)]}, "LLM_PARAM_INVALID"),
        ({"runs": [(2 * MIB, 8, 1, 0)]}, "LLM_PARAM_INVALID"),
        ({"runs": [(0, 2 * MIB + 1, 1, 0)], "count": 2 * MIB + 1}, "LLM_PARAM_INVALID"),
        ({"runs": [(0, 0, 1, 0)], "count": 0}, "LLM_PARAM_INVALID"),
        ({"runs": [(0, 8, 0, 0)], "count": 0}, "LLM_PARAM_INVALID"),
        ({"runs": [(0, 8, 2, 2 * MIB)], "count": 16}, "LLM_PARAM_INVALID"),  # the second piece is outside
        ({"runs": [(0, 8, 2, -8)], "count": 16}, "LLM_PARAM_INVALID"),  # before the first byte
        ({"runs": [(0, 8, 2, 0)], "count": 16}, "LLM_PARAM_INVALID"),  # the same bytes again and again
        ({"runs": [(0, 8, 2**61, 2**61)]}, "LLM_PARAM_INVALID"),  # overflows
        ({"runs": [(0, 8, 2, -(2**63))]}, "LLM_PARAM_INVALID"),
        ({"first": 1}, "LLM_PARAM_INVALID"),
        ({"first": 2**64 - 4}, "LLM_PARAM_INVALID"),
        ({"count": 9}, "LLM_PARAM_INVALID"),
        ({"count": 0}, "LLM_PARAM_INVALID"),
    ],
)
def test_every_request_is_checked_against_our_own_tables(established, kind, changes, status):
    node, sock = established
    sock.sendall(ask(kind, **changes))
    assert receive_reply(sock) == (LLMStatusCode[status], 0)
    sock.sendall(ask(READ))  # the link is still good
    assert receive_reply(sock) == (0, 8)
    assert receive_exactly(sock, 8) == node.block(0, 0)[:8]


def test_strided_runs_name_bytes_in_order(established):
    node, sock = established
    sock.sendall(ask(READ, stop=2, runs=[(64, 4, 3, -16), (128, 8, 1, 0)], count=40))
    assert receive_reply(sock) == (0, 40)
    per_tensor = [(64, 4), (48, 4), (32, 4), (128, 8)]
    expected = b"".join(node.block(tensor, 0)[at : at + size] for tensor in (0, 1) for at, size in per_tensor)
    assert receive_exactly(sock, 40) == expected
    sock.sendall(ask(READ, stop=2, runs=[(64, 4, 3, -16), (128, 8, 1, 0)], first=6, count=17))
    receive_reply(sock)
    assert receive_exactly(sock, 17) == expected[6:23]


def is_ended(sock) -> bool:
    """Whether what comes ends; a farewell may be before that."""
    sock.settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass
    return True


GARBAGE = [
    plane_frame(READ, b"junk"),
    plane_frame(READ, size=3 << 20),
    plane_frame(REPLY, bytes(16)),
    plane_frame(BYE, b"x"),
    plane_frame(9),
    plane_frame(READ, magic=MAGIC),
    ask(READ, num_runs=2),
    ask(WRITE, num_runs=2**32 - 1),
    b"\0" * 16,
    frame(encode(Ready())),
    plane_frame(READ, bytes(80))[:12],  # stops there: until the timeout
    plane_frame(READ, size=80) + b"x",
    ask(WRITE, count=8),  # and no bytes
]


@pytest.mark.parametrize("data", GARBAGE)
def test_garbage_on_a_link_ends_that_link_only(established, data):
    node, sock = established
    sock.sendall(data)
    assert is_ended(sock)
    with dial(node) as again:
        assert connect(again, cluster_id=6).status == 0
    assert node.datadist._engine.plane.stats().bad_frames == 1


@pytest.mark.parametrize("seed", range(8))
def test_random_and_mutated_frames_never_harm(make_node, seed):
    """Whatever an authenticated peer says, its link ends, and the next one is served."""
    node = make_node(listen=True, timeout_ms=100)
    chance = random.Random(seed)
    for _ in range(12):
        data = bytearray(b"".join(ask(READ, count=8) for _ in range(chance.randint(1, 3))))
        for _ in range(chance.randint(0, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        data = data[: chance.randint(1, len(data))] if chance.random() < 0.3 else data
        with dial(node) as sock:
            establish(node, sock)
            with contextlib.suppress(OSError):  # it may have hung up in the meantime
                sock.sendall(data if chance.random() < 0.8 else os.urandom(200))
                sock.shutdown(socket.SHUT_WR)
            assert is_ended(sock)
    with dial(node) as sock:
        establish(node, sock)
        sock.sendall(ask(READ, start=3, stop=4))
        assert receive_reply(sock) == (0, 8)


def test_a_stalled_peer_holds_a_cache_no_longer_than_the_timeout(established):
    node, sock = established
    sock.sendall(ask(READ, stop=4, runs=[(0, 2 * MIB, 1, 0)], count=8 * MIB))  # and does not read the answer
    wait_until(lambda: node.datadist._engine.plane.stats().num_bytes > 0)
    started = time.monotonic()
    node.manager.unregister_cache(1)
    assert time.monotonic() - started < 5
    wait_until(lambda: node.datadist._engine.plane.stats().stalled == 1)
    wait_until(lambda: node.datadist._engine.plane.stats().connections == 0)


def test_nonsense_caches_do_not_become_a_link(make_node):
    node = make_node(listen=True)
    entry = {
        "cache_id": 1,
        "is_blocks": True,
        "accessible": True,
        "num_tensors": 2,
        "tensor_bytes": 64,
        "num_slots": 0,
        "req_keys": [],
        "arena_ids": [],
        "arena_offsets": [],
    }
    with dial(node) as sock:
        body = msgspec.msgpack.encode(
            {
                "type": "connect",
                "cluster_id": 5,
                "instance": b"",
                "force": True,
                "remote_accessible": True,
                "transport": "tcp",
                "boot_id": "",
                "caches": [entry],
                "connections": 1,
            }
        )
        send_frame(sock, body, soon())
        reply = channel.receive_message(sock, ConnectReply, soon())
        with socket.create_connection(("127.0.0.1", node.port)) as reverse:
            configure(reverse)
            channel.dial(reverse, KEY, "reverse", reply.link_token, soon())
            channel.send_message(sock, Ready(), soon())
            wait_until(lambda: node.datadist._engine.counters.bad_frames == 1)
    assert node.datadist._engine.links.all() == []


def test_a_proof_cannot_be_reflected(make_node):
    """Sending the listener's own challenge back as our proof does not pass."""
    node = make_node(listen=True)
    with socket.create_connection(("127.0.0.1", node.port)) as sock:
        configure(sock)
        send_frame(sock, hello(), soon())
        challenge = msgspec.msgpack.decode(receive_frame(sock, soon()))
        channel.send_message(sock, Proof(proof=challenge["proof"]), soon())
        wait_until(lambda: node.datadist._engine.counters.not_authenticated == 1)
