# SPDX-License-Identifier: Apache-2.0
"""torch.distributed over gloo: a message per piece, or gathered into one message and scattered again.

The reader asks with a one-element message, so that the clock covers the gathering.
"""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from vllm_ascend_pd.bench.transfer.contenders import base
from vllm_ascend_pd.bench.transfer.geometry import Request

_MAX_MESSAGES = 4096  # more pieces than this only in one message: gloo pays tens of microseconds for each


class Contender(base.Contender):
    """Rank 0 is the source."""

    def _join(self, port: int, rank: int) -> None:
        try:
            import torch
            import torch.distributed as dist
        except ImportError as error:
            raise base.NotInstalledError(f"torch: {error}") from None
        self.torch, self.dist = torch, dist
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=base.PEER_TIMEOUT_S),
        )
        array = (ctypes.c_char * self.job.geometry.pool_bytes).from_address(self.address)
        self.memory = torch.frombuffer(array, dtype=torch.uint8)
        self.ask = torch.zeros(1, dtype=torch.uint8)
        self.staging = torch.zeros(self.job.geometry.payload_bytes, dtype=torch.uint8)

    def hello(self) -> dict[str, Any]:
        """A port for the rendezvous."""
        try:
            import torch.distributed  # noqa: F401
        except ImportError as error:
            raise base.NotInstalledError(f"torch: {error}") from None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        return {"port": self.port}

    def accept(self) -> None:
        """Join as rank 0, which opens the port."""
        self._join(self.port, 0)

    def connect(self, hello: Mapping[str, Any]) -> dict[str, Any]:
        """Join as rank 1."""
        self._join(hello["port"], 1)
        return {"torch": self.torch.__version__}

    def variants(self, piece_bytes: int) -> list[str]:
        """One message per piece is tried where there are not too many."""
        few = self.job.geometry.payload_bytes // piece_bytes <= _MAX_MESSAGES
        return ["staged", "pieces"] if few else ["staged"]

    def _cut(self, request: Request) -> tuple[Any, Any, Any]:
        piece = request.layout.piece_bytes
        rows = [
            self.torch.tensor([offset // piece for offset in offsets])
            for offsets in (request.src_offsets, request.dst_offsets)
        ]
        return self.memory.view(-1, piece), rows[0], rows[1]

    def serve(self, request: Request, variant: str) -> None:
        """Wait to be asked, then send."""
        table, rows, _ = self._cut(request)
        self.dist.recv(self.ask, 1)
        if variant == "pieces":
            works = [self.dist.isend(table[row], 1) for row in rows.tolist()]
            for work in works:
                work.wait()
            return
        staging = self.staging.view(-1, request.layout.piece_bytes)
        self.torch.index_select(table, 0, rows, out=staging)
        self.dist.send(staging, 1)

    def pull(self, request: Request, variant: str) -> base.Timing:
        """Ask, receive, put in place."""
        table, _, rows = self._cut(request)
        targets = rows.tolist()
        staging = self.staging.view(-1, request.layout.piece_bytes)
        start = time.perf_counter()
        self.dist.send(self.ask, 0)
        if variant == "pieces":
            works = [self.dist.irecv(table[row], 0) for row in targets]
            for work in works:
                if work is not None:
                    work.wait()
        else:
            self.dist.recv(staging, 0)
            table.index_copy_(0, rows, staging)
        return base.Timing(time.perf_counter() - start)
