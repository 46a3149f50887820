# SPDX-License-Identifier: Apache-2.0
"""Extract and inject on host memory: one call into the C++ core for all parts of a chunk. Any thread; blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.native.copying import CopyPlan, CopyState, execute
from vllm_ascend_pd.transfer.staging.chunks import Part


class StagingError(PDError):
    """A staged transfer could not go on; the reason goes to the API server's policy."""


class Copier(Protocol):
    """Moves the bytes of parts between the cache and a slot. Deadlines are monotonic seconds."""

    def extract(self, parts: Sequence[Part], slot: int, deadline: float) -> None:
        """Gather into the slot at address `slot`. Raises StagingError."""

    def inject(self, parts: Sequence[Part], slot: int, deadline: float) -> None:
        """Scatter from the slot at address `slot`. Raises StagingError."""


class HostCopier:
    """Caches and staging buffer in host memory."""

    def extract(self, parts: Sequence[Part], slot: int, deadline: float) -> None:
        """See Copier."""
        self._move(parts, slot, deadline, into_slot=True)

    def inject(self, parts: Sequence[Part], slot: int, deadline: float) -> None:
        """See Copier."""
        self._move(parts, slot, deadline, into_slot=False)

    def _move(self, parts: Sequence[Part], slot: int, deadline: float, *, into_slot: bool) -> None:
        plan = CopyPlan()
        for part in parts:
            per_tensor = part.block_bytes * len(part.blocks)
            base = slot + part.offset
            staged = [base + index * per_tensor for index in range(len(part.tensors))]
            tensors, ids = (part.tensors, part.blocks), (staged, range(len(part.blocks)))
            (src, src_blocks), (dst, dst_blocks) = (tensors, ids) if into_slot else (ids, tensors)
            plan.add(src, dst, src_blocks, dst_blocks, part.block_bytes)
        if execute(plan, deadline=deadline) is not CopyState.DONE:
            raise StagingError(f"deadline: {plan.num_bytes} bytes were not staged in time")
