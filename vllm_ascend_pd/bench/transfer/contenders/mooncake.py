# SPDX-License-Identifier: Apache-2.0
"""Mooncake's transfer engine over TCP: one synchronous batch per pull, the whole pool registered once."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm_ascend_pd.bench.transfer.contenders import base
from vllm_ascend_pd.bench.transfer.geometry import Request, shift

_PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")


class Contender(base.Contender):
    """`batch_transfer_sync_read` of lists of addresses, which are made before the clock starts."""

    def _start(self) -> None:
        try:
            module: Any = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise base.NotInstalledError(f"mooncake.engine: {error}") from None
        self.engine = module.TransferEngine()
        code = self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        if code != 0:
            raise RuntimeError(f"TransferEngine.initialize: {code}")
        code = self.engine.register_memory(self.address, self.job.geometry.pool_bytes)
        if code != 0:
            raise RuntimeError(f"TransferEngine.register_memory: {code}")

    def hello(self) -> dict[str, Any]:
        """Its address."""
        self._start()
        return {"session": f"127.0.0.1:{self.engine.get_rpc_port()}", "address": self.address}

    def connect(self, hello: Mapping[str, Any]) -> dict[str, Any]:
        """Start; the first read connects."""
        self._start()
        self.session, self.remote = hello["session"], hello["address"]
        for package in _PACKAGES:
            try:
                return {package: version(package)}
            except PackageNotFoundError:
                continue
        return {}

    def pull(self, request: Request, variant: str) -> base.Timing:
        """One batch."""
        local = shift(request.dst_offsets, self.address).tolist()
        remote = shift(request.src_offsets, self.remote).tolist()
        sizes = [request.layout.piece_bytes] * len(local)
        start = time.perf_counter()
        code = self.engine.batch_transfer_sync_read(self.session, local, remote, sizes)
        seconds = time.perf_counter() - start
        if code != 0:
            raise RuntimeError(f"batch_transfer_sync_read of {len(local)} pieces: {code}")
        return base.Timing(seconds)
