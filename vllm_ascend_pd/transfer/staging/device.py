# SPDX-License-Identifier: Apache-2.0
"""Staging on an NPU: the buffer in device memory, and a copier that extracts and injects with one launch per chunk.

Runs in the pull threads (decode) and in "pd-stage" (prefill), each on a stream of its own. They wait for their own
launches, the step's thread never does. Not run on an NPU: the tests run it over torch-npu and our stand-in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.npu import ops
from vllm_ascend_pd.npu.order import Order
from vllm_ascend_pd.transfer.staging.chunks import Part
from vllm_ascend_pd.transfer.staging.copier import StagingError
from vllm_ascend_pd.transfer.staging.reserve import ALIGNMENT

if TYPE_CHECKING:
    import torch

    from vllm_ascend_pd.npu.extension import Event


class DeviceMemory:
    """Uninitialised device memory at a 2 MiB-aligned address, as torch's allocator gives it; one alignment larger."""

    def __init__(self, num_bytes: int, device: Any) -> None:
        import torch

        raw = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
        self.tensor = raw[-raw.data_ptr() % ALIGNMENT :][:num_bytes]
        self.address = int(self.tensor.data_ptr())


class DeviceCopier:
    """Moves parts between the caches and a slot of `staging`.

    Args:
        blocks: by the address of block 0 each registered tensor, `[num_blocks, …]`, on the same device as staging.
    """

    def __init__(self, blocks: Mapping[int, torch.Tensor], staging: torch.Tensor, order: Order) -> None:
        self._blocks = dict(blocks)
        self._staging = staging
        self._base = int(staging.data_ptr())
        self._order = order

    def extract(self, parts: Sequence[Part], slot: int, deadline: float) -> None:
        """Gather into the slot, behind what the model has written by now. Raises StagingError."""
        self._move(ops.extract, parts, slot, deadline)

    def inject(self, parts: Sequence[Part], slot: int, deadline: float) -> None:
        """Scatter from the slot; the bytes are there when this returns. Raises StagingError.

        What the model has launched by now comes first: it may still write to blocks that were another request's.
        """
        self._move(ops.inject, parts, slot, deadline)

    def _move(self, operation: Callable[..., Event], parts: Sequence[Part], slot: int, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise StagingError("deadline: it had passed before the chunk was staged")
        events: list[Event] = []
        errors: list[Exception] = []
        try:
            with self._order.own_stream():
                self._order.wait_on_stream()
                for tensors, ids, start, stop in self._launches(parts, slot):
                    events.append(operation(tensors, ids, self._staging[start:stop]))
        except Exception as error:  # whatever it is (a kernel that does not compile): what was launched runs on
            errors.append(error)
        for event in events:  # a launch cannot be called back: the slot and the blocks are in use until it is over
            try:
                event.synchronize()
            except RuntimeError as error:
                errors.append(error)
        if errors:
            raise StagingError(f"staging: the device refused: {errors[0]}") from errors[0]

    def _launches(
        self, parts: Sequence[Part], slot: int
    ) -> Iterator[tuple[list[torch.Tensor], tuple[int, ...], int, int]]:
        """Tensors, blocks, and the bytes of staging `[start, stop)`: parts with the same blocks are one launch."""
        index = 0
        while index < len(parts):
            first, tensors, size = parts[index], [], 0
            while index < len(parts) and parts[index].blocks == first.blocks:
                part = parts[index]
                tensors += [self._find(address, part.block_bytes) for address in part.tensors]
                size += part.block_bytes * len(part.blocks) * len(part.tensors)
                index += 1
            start = slot - self._base + first.offset
            yield tensors, first.blocks, start, start + size

    def _find(self, address: int, block_bytes: int) -> torch.Tensor:
        """The tensor whose block 0 is at this address; the probe of a link asks for parts of staging itself."""
        tensor = self._blocks.get(address)
        if tensor is None:
            offset = address - self._base
            if not 0 <= offset < len(self._staging):
                raise ValueError(f"no registered tensor begins at {address:#x}")
            rest = self._staging[offset:]
            tensor = rest[: len(rest) // block_bytes * block_bytes].view(-1, block_bytes)
        return tensor
