# SPDX-License-Identifier: Apache-2.0
"""One deployment for all HTTP tests: two prefill, two decode and one aggregated server of one tiny model."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.http.servers import START_TIMEOUT_S, Server, start_server


@dataclasses.dataclass(frozen=True)
class Deployment:
    """`front` asks the prefill servers itself (two API server processes); `bare` has no --pd-prefill and is strict."""

    folder: Path
    secret_file: Path
    prefill: tuple[Server, Server]
    front: Server
    bare: Server
    aggregated: Server

    @property
    def all(self) -> list[Server]:
        """Every server."""
        return [*self.prefill, self.front, self.bare, self.aggregated]


@pytest.fixture(scope="package")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """All five start together: on two cores one after the other would take five times as long."""
    folder = tmp_path_factory.mktemp("http")
    secret_file = folder / "secret"
    secret_file.touch(0o600)
    secret_file.write_text(secrets.token_hex(32))
    common = ("--pd-secret-file", str(secret_file), "--pd-listen", "127.0.0.1", "--pd-deadline", "30s")
    servers: list[Server] = []

    def start(name: str, core: int, *arguments: str, executor: str | None = "uni") -> Server:
        server = start_server(name, folder, core, *arguments, executor=executor)
        servers.append(server)
        return server

    try:
        first = start("prefill-0", 1, "--pd-role", "prefill", *common)
        second = start("prefill-1", 1, "--pd-role", "prefill", *common)
        urls = (first.url, second.url)
        # As users start it: the default executor, and more than one API server.
        asking = ("--pd-role", "decode", "--pd-prefill", *urls, "--api-server-count", "2")
        front = start("front", 0, *asking, *common, executor=None)
        bare = start("bare", 0, "--pd-role", "decode", "--pd-require-remote-kv", *common)
        aggregated = start("aggregated", 0)
        deadline = time.monotonic() + START_TIMEOUT_S
        for server in servers:
            server.wait_healthy(deadline)
        yield Deployment(folder, secret_file, (first, second), front, bare, aggregated)
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.stop()
        if os.environ.get("PD_KEEP_LOGS"):
            print(f"logs are in {folder}")
