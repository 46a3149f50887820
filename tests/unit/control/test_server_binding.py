# SPDX-License-Identifier: Apache-2.0
"""The control server's addresses: what cannot be bound is named, and what it leaves behind."""

from __future__ import annotations

import os
import socket
import stat
import time

import pytest

from tests.unit.control.conftest import HANDLERS, SECRET, peer_address
from vllm_ascend_pd.control.server import ControlServer
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.wire import (
    Ack,
    CancelTransfer,
    HealthQuery,
    HealthReply,
)


def test_a_taken_port_is_named_with_host_flag_and_hint(servers):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PDConfigError) as caught:
            servers.start(peer=f"tcp://127.0.0.1:{port}")
    for word in ("--pd-listen", "127.0.0.1", str(port), "another process"):
        assert word in str(caught.value)


@pytest.mark.parametrize("peer", ["tcp://203.0.113.7:0", "tcp://[2001:db8::7]:0"])
def test_an_address_of_another_machine_is_named(servers, peer):
    with pytest.raises(PDConfigError, match="--pd-listen") as caught:
        servers.start(peer=peer)
    assert peer.removeprefix("tcp://").removesuffix(":0").strip("[]") in str(caught.value)


@pytest.mark.parametrize("peer", ["127.0.0.1:1", "tcp://", "tcp://host", "tcp://h:p", "tcp://no.such.host.invalid:0"])
def test_a_bad_endpoint_names_the_flag(servers, peer):
    with pytest.raises(PDConfigError, match="--pd-listen"):
        servers.start(peer=peer)


def test_a_missing_directory_for_the_local_socket_is_named(tmp_path):
    server = ControlServer(str(tmp_path / "none" / "core.sock"), None, SECRET, HANDLERS)
    with pytest.raises(PDConfigError, match="none/core.sock"):
        server.start()


def test_a_failed_start_leaves_the_port_free(servers, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    broken = ControlServer(str(tmp_path / "none" / "x.sock"), f"tcp://127.0.0.1:{port}", SECRET, HANDLERS)
    with pytest.raises(PDConfigError):
        broken.start()
    assert servers.start(peer=f"tcp://127.0.0.1:{port}").peer_port == port


@pytest.mark.parametrize("port", ["0", "*"])
def test_a_free_port_is_chosen_and_told(servers, ask, port):
    server = servers.start(peer=f"tcp://127.0.0.1:{port}")
    assert server.peer_port > 0
    assert ask(peer_address(server), CancelTransfer(transfer_id="t")) == Ack()


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "*"])
def test_names_and_wildcards_can_be_bound(servers, ask, host):
    server = servers.start(peer=f"tcp://{host}:0")
    dialled = "localhost" if host == "localhost" else "127.0.0.1"
    assert ask(peer_address(server, dialled), CancelTransfer(transfer_id="t")) == Ack()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("host", ["[::1]", "[::]"])
def test_ipv6_literals_work(servers, ask, host):
    server = servers.start(peer=f"tcp://{host}:0")
    assert ask(peer_address(server, "[::1]"), CancelTransfer(transfer_id="t")) == Ack()


def test_without_a_peer_endpoint_there_is_no_peer_plane(servers, ask):
    server = servers.start(peer=None)
    assert server.peer_port == 0
    assert ask(servers.local(), HealthQuery()) == HealthReply()


def test_the_local_socket_is_ours_alone_and_gone_after_close(servers):
    server = servers.start()
    path = servers.directory / "core.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server.close()
    assert not path.exists()


def test_two_servers_in_one_process_do_not_share_their_gates(servers, ask):
    other = Secret(b"another deployment's secret")
    one, two = servers.start(name="one"), servers.start(name="two", secret=other)
    assert ask(peer_address(one), CancelTransfer(transfer_id="t")) == Ack()
    assert ask(peer_address(two), CancelTransfer(transfer_id="t"), secret=other) == Ack()
    one.close()
    assert ask(peer_address(two), CancelTransfer(transfer_id="t"), secret=other) == Ack()


def test_a_server_starts_once(servers):
    server = servers.start()
    with pytest.raises(RuntimeError, match="once"):
        server.start()


def test_closing_before_start_and_twice_is_harmless(tmp_path, servers):
    ControlServer(str(tmp_path / "x.sock"), None, SECRET, {}).close()
    server = servers.start()
    server.close()
    server.close()


def test_a_server_made_before_a_fork_starts_in_the_child(servers, ask):
    server = ControlServer(servers.local("child"), "tcp://127.0.0.1:0", SECRET, HANDLERS)
    ready_out, ready_in = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            server.start()
            os.write(ready_in, b"%d\n" % server.peer_port)
            time.sleep(30)
        finally:
            os._exit(1)
    try:
        port = int(os.read(ready_out, 16))
        assert ask(f"tcp://127.0.0.1:{port}", CancelTransfer(transfer_id="t")) == Ack()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(ready_in)
        os.close(ready_out)
