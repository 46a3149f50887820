# SPDX-License-Identifier: Apache-2.0
"""NIXL with its UCX backend: READ of one descriptor per piece, in its two ways.

`prep`: descriptors of every block are prepared at connect time, a pull names indices (vLLM's NixlConnector does so).
`init`: a pull brings its descriptors. Both are timed from arrays in hand to "DONE"; `posting_seconds` is the part
before the transfer ran. The source has NIXL's progress thread (without it an idle source hangs the first READ).
"""

from __future__ import annotations

import base64
import importlib
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm_ascend_pd.bench.transfer.contenders import base
from vllm_ascend_pd.bench.transfer.geometry import Request, shift

_MODULES = ("nixl_cu12", "nixl_cu13", "nixl", "rixl")


def _import_nixl() -> Any:
    problems = []
    for name in _MODULES:
        try:
            return importlib.import_module(f"{name}._api"), name
        except ImportError as error:
            problems.append(f"{name}: {error}")
    raise base.NotInstalledError("; ".join(problems))


class Contender(base.Contender):
    """One agent per process, the whole pool registered once."""

    def _start(self, *, has_progress: bool) -> None:
        try:
            import numpy
        except ImportError as error:
            raise base.NotInstalledError(f"numpy: {error}") from None
        self.numpy = numpy
        self.api, self.module = _import_nixl()
        threads = self.job.num_threads if self.job.options.get("threads") == "all" else 0  # 0: NIXL's default
        config = self.api.nixl_agent_config(has_progress, False, 0, num_threads=threads, backends=["UCX"])
        self.agent = self.api.nixl_agent(self.job.role, config)
        self.registered = self.agent.register_memory([(self.address, self.job.geometry.pool_bytes, 0, "")], "DRAM")

    def hello(self) -> dict[str, Any]:
        """Its metadata, as NIXL's own side channels carry it."""
        self._start(has_progress=True)
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self.address}

    def connect(self, hello: Mapping[str, Any]) -> dict[str, Any]:
        """Know the source and prepare the descriptors of all blocks, for each piece size."""
        self._start(has_progress=self.job.options["reader_progress"] == "1")
        self.remote = self.agent.add_remote_agent(base64.b64decode(hello["metadata"]))
        self.remote_address = hello["address"]
        self.agent.make_connection(self.remote)
        self.prepared = {piece: self._prepare(piece) for piece in self.job.pieces}
        facts = {"module": self.module, "modes": "init, prep", "progress thread": self.job.options["reader_progress"]}
        for package in (self.module.replace("_", "-"), "nixl"):
            try:
                return {**facts, package: version(package)}
            except PackageNotFoundError:
                continue
        return facts

    def _describe(self, offsets: Any, base_address: int, piece: int) -> Any:
        table = self.numpy.zeros((len(offsets), 3), dtype=self.numpy.uint64)
        table[:, 0] = self.numpy.asarray(offsets, dtype=self.numpy.uint64) + self.numpy.uint64(base_address)
        table[:, 1] = piece
        return table

    def _prepare(self, piece: int) -> tuple[Any, Any]:
        offsets = self.numpy.arange(0, self.job.geometry.pool_bytes, piece)
        local = self.agent.get_xfer_descs(self._describe(offsets, self.address, piece), "DRAM")
        remote = self.agent.get_xfer_descs(self._describe(offsets, self.remote_address, piece), "DRAM")
        return self.agent.prep_xfer_dlist("", local), self.agent.prep_xfer_dlist(self.remote, remote)

    def variants(self, piece_bytes: int) -> list[str]:
        """Both ways."""
        return ["prep", "init"]

    def pull(self, request: Request, variant: str) -> base.Timing:
        """Make the request, post it, poll until it is done."""
        piece = request.layout.piece_bytes
        if variant == "prep":
            local, remote = self.prepared[piece]
            into, out_of = (
                self.numpy.asarray(offsets, dtype=self.numpy.int64) // piece
                for offsets in (request.dst_offsets, request.src_offsets)
            )
            into, out_of = into.astype(self.numpy.int32), out_of.astype(self.numpy.int32)
            start = time.perf_counter()
            handle = self.agent.make_prepped_xfer("READ", local, into, remote, out_of)
        else:
            tables = (
                self._describe(shift(request.dst_offsets, self.address), 0, piece),
                self._describe(shift(request.src_offsets, self.remote_address), 0, piece),
            )
            start = time.perf_counter()
            descriptors = [self.agent.get_xfer_descs(table, "DRAM") for table in tables]
            handle = self.agent.initialize_xfer("READ", descriptors[0], descriptors[1], self.remote)
        posted = time.perf_counter()
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        end = time.perf_counter()
        self.agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL transfer ended in state {state}")
        return base.Timing(end - start, posted - start)
