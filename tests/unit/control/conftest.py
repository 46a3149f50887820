# SPDX-License-Identifier: Apache-2.0
"""Running control servers on free ports and short socket paths."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_ascend_pd.control.client import ControlClient
from vllm_ascend_pd.control.server import ControlServer, Reply
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.wire import Ack, CancelTransfer, ComputeLocally, HealthQuery, HealthReply

SECRET = Secret(b"a secret of a deployment")


def ack(_message, reply: Reply) -> None:
    reply.send(Ack())


HANDLERS = {
    CancelTransfer: ack,
    ComputeLocally: ack,
    HealthQuery: lambda _message, reply: reply.send(HealthReply()),
}


class Servers:
    """Starts servers and closes all of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[ControlServer] = []

    def start(self, handlers=None, secret=SECRET, peer="tcp://127.0.0.1:0", name="core", **kwargs) -> ControlServer:
        server = ControlServer(
            str(self.directory / f"{name}.sock"), peer, secret, HANDLERS if handlers is None else handlers, **kwargs
        )
        server.start()
        self.started.append(server)
        return server

    def local(self, name="core") -> str:
        return f"ipc://{self.directory}/{name}.sock"


@pytest.fixture
def servers() -> Iterator[Servers]:
    with tempfile.TemporaryDirectory(prefix="pd") as directory:
        running = Servers(Path(directory))
        yield running
        for server in running.started:
            server.close()
            assert not server.alive()


def peer_address(server: ControlServer, host: str = "127.0.0.1") -> str:
    return f"tcp://{host}:{server.peer_port}"


@pytest.fixture
def ask():
    clients = []

    def request(endpoint, message, timeout_s=5.0, attempts=2, secret=SECRET):
        client = ControlClient(endpoint, secret)
        clients.append(client)
        return client.request(message, timeout_s, attempts)

    yield request
    for client in clients:
        client.close()
