# SPDX-License-Identifier: Apache-2.0
"""One plain TCP stream over loopback: 64 MiB from one place to one place, large system calls, no pieces at all.

The reader asks with one byte, so that nothing lies in the socket's buffers when the clock starts.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any

from vllm_ascend_pd.bench import native
from vllm_ascend_pd.bench.transfer.contenders import base
from vllm_ascend_pd.bench.transfer.geometry import Request

_CHUNKS = {"256 KiB calls": 256 << 10, "1 MiB calls": 1 << 20, "8 MiB calls": 8 << 20}


class Contender(base.Contender):
    """A stream from the first moved piece's neighbourhood; the bytes are verified as one piece."""

    def hello(self) -> dict[str, Any]:
        """Listen."""
        self.server = socket.create_server(("127.0.0.1", 0))
        return {"port": self.server.getsockname()[1]}

    def accept(self) -> None:
        """Take the reader's connection."""
        self.server.settimeout(base.PEER_TIMEOUT_S)
        self.stream, _ = self.server.accept()
        self._prepare()

    def connect(self, hello: Mapping[str, Any]) -> dict[str, Any]:
        """Dial."""
        self.stream = socket.create_connection(("127.0.0.1", hello["port"]), timeout=base.PEER_TIMEOUT_S)
        self._prepare()
        return {"streams": 1}

    def _prepare(self) -> None:
        self.stream.setblocking(True)
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def variants(self, piece_bytes: int) -> list[str]:
        """Bytes per system call."""
        return list(_CHUNKS)

    def serve(self, request: Request, variant: str) -> None:
        """Wait to be asked, then send."""
        self.stream.recv(1)
        native.send(self.stream.fileno(), self.address + request.src_offsets[0], request.num_bytes, _CHUNKS[variant])

    def pull(self, request: Request, variant: str) -> base.Timing:
        """Ask and receive."""
        start = time.perf_counter()
        self.stream.send(b"\0")
        native.receive(self.stream.fileno(), self.address + request.dst_offsets[0], request.num_bytes, _CHUNKS[variant])
        return base.Timing(time.perf_counter() - start)
