# SPDX-License-Identifier: Apache-2.0
"""The listener under bad input: counted, dropped, and still serving afterwards."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time

import msgspec
import pytest

from tests.unit.datadist.datadist_peer import SECRET
from vllm_ascend_pd.datadist.host import channel, server
from vllm_ascend_pd.datadist.host.framing import MAGIC, ChannelError, configure, receive_frame, send_frame
from vllm_ascend_pd.datadist.host.messages import (
    Connect,
    ConnectReply,
    DataReply,
    Hello,
    Proof,
    Read,
    Ready,
    Write,
    encode,
)
from vllm_ascend_pd.datadist.status import LLMStatusCode

KEY = bytes.fromhex(SECRET)


def soon() -> float:
    return time.monotonic() + 5


def frame(body: bytes, magic: int = MAGIC, size: int | None = None) -> bytes:
    return struct.pack("<II", magic, len(body) if size is None else size) + body


def hello(**changes) -> bytes:
    return encode(Hello(**{"protocol": 1, "purpose": "link", "nonce": bytes(32), **changes}))


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
        (frame(os.urandom(64)), "bad_frames"),
        (frame(b"\x91" * 4000), "bad_frames"),  # deeply nested
        (frame(msgspec.msgpack.encode({"type": "exec", "code": "1"})), "bad_frames"),
        (frame(encode(Ready())), "bad_frames"),
        (frame(hello(protocol=2)), "bad_frames"),
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


@pytest.mark.parametrize("purpose", ["reverse", "arenas", "shell"])
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
    }
    channel.send_message(sock, Connect(**{**message, **changes}), soon())
    return channel.receive_message(sock, ConnectReply, soon())


def test_peer_in_message_mode_is_refused(make_node):
    node = make_node(listen=True)
    with dial(node) as sock:
        reply = connect(sock, remote_accessible=False)
    assert reply.status == LLMStatusCode.LLM_PARAM_INVALID
    assert "enable_remote_cache_accessible" in reply.reason


@pytest.fixture
def established(make_node):
    """(node, our raw end of a link to it): an authenticated peer that may say anything."""
    node = make_node(listen=True, timeout_ms=300)
    with dial(node) as sock:
        reply = connect(sock)
        with socket.create_connection(("127.0.0.1", node.port)) as reverse:
            configure(reverse)
            channel.dial(reverse, KEY, "reverse", reply.link_token, soon())
            channel.send_message(sock, Ready(), soon())
            assert channel.receive_message(sock, Ready, soon()).status == 0
            yield node, sock


def ask(cls, **changes):
    fields = {"cache_id": 1, "tensor_start": 0, "tensor_stop": 1, "offsets": [0], "sizes": [8]}
    return cls(**{**fields, **changes})


@pytest.mark.parametrize("cls", [Read, Write])
@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"cache_id": 2}, "LLM_KV_CACHE_NOT_EXIST"),
        ({"cache_id": -1}, "LLM_KV_CACHE_NOT_EXIST"),
        ({"tensor_start": -1}, "LLM_PARAM_INVALID"),
        ({"tensor_stop": 5}, "LLM_PARAM_INVALID"),
        ({"tensor_start": 1}, "LLM_PARAM_INVALID"),
        ({"offsets": [-8]}, "LLM_PARAM_INVALID"),
        ({"offsets": [2 << 20]}, "LLM_PARAM_INVALID"),
        ({"sizes": [(2 << 20) + 1]}, "LLM_PARAM_INVALID"),
        ({"sizes": [0]}, "LLM_PARAM_INVALID"),
        ({"sizes": [8, 8]}, "LLM_PARAM_INVALID"),
    ],
)
def test_every_request_is_checked_against_our_own_tables(established, cls, changes, status):
    _, sock = established
    channel.send_message(sock, ask(cls, **changes), soon())
    reply = channel.receive_message(sock, DataReply, soon())
    assert reply.status == LLMStatusCode[status]
    assert reply.num_bytes == 0
    channel.send_message(sock, ask(Read), soon())  # the link is still good
    assert channel.receive_message(sock, DataReply, soon()).num_bytes == 8


@pytest.mark.parametrize(
    "data", [frame(b"junk"), frame(b"", size=5 << 20), b"\0" * 8, frame(encode(Ready())), frame(b"x" * 9)[:12]]
)
def test_garbage_on_a_link_ends_that_link_only(established, data):
    node, sock = established
    sock.sendall(data)
    with contextlib.suppress(ChannelError):
        receive_frame(sock, soon())  # a farewell, perhaps
    with pytest.raises(ChannelError):
        receive_frame(sock, soon())  # the end
    with dial(node) as again:
        assert connect(again, cluster_id=6).status == 0


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
