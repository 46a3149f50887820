# SPDX-License-Identifier: Apache-2.0
"""The copy limit: the same pieces, copied inside one process by a plain team of threads.

Nothing is sent, no ids are translated, nothing is checked: only bytes. The best kernel and thread count are searched
for each piece size. Independent of our copy engine (csrc_npu/bench).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_ascend_pd.bench import native
from vllm_ascend_pd.bench.pool import Pool
from vllm_ascend_pd.bench.transfer.contenders import base
from vllm_ascend_pd.bench.transfer.geometry import Request, shift


class Contender(base.Contender):
    """Both pools in the reader."""

    def make_pool(self) -> int:
        """The destination; the source beside it."""
        self.source = Pool(self.job.geometry.pool_bytes)
        self.teams = {count: native.Team(count) for count in range(1, self.job.num_threads + 1)}
        return super().make_pool()

    @property
    def source_address(self) -> int:
        """Of the pool that is copied from."""
        return self.source.address

    def connect(self, hello: Mapping[str, Any]) -> dict[str, Any]:
        """Nobody to link to."""
        return {"kernels": native.kernel_names(), "threads": sorted(self.teams)}

    def variants(self, piece_bytes: int) -> list[str]:
        """Every kernel with every thread count."""
        return [f"{kernel} x{count}" for kernel in native.kernel_names() for count in self.teams]

    def pull(self, request: Request, variant: str) -> base.Timing:
        """Copy; timed inside the library."""
        kernel, _, count = variant.rpartition(" x")
        sources = shift(request.src_offsets, self.source.address)
        destinations = shift(request.dst_offsets, self.address)
        index = native.kernel_names().index(kernel)
        return base.Timing(self.teams[int(count)].copy(index, request.layout.piece_bytes, destinations, sources))

    def close(self) -> None:
        """End the threads."""
        for team in self.teams.values():
            team.close()
