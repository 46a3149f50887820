# SPDX-License-Identifier: Apache-2.0
"""Extract and inject with torch's own operators: works on any device, costs a few launches per tensor.

The bytes in staging are the same as the extension's, so either side of a transfer may use either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.npu.layers import CacheTensor, count_staging_bytes

if TYPE_CHECKING:
    import torch

    from vllm_ascend_pd.npu.extension import Event


class FinishedEvent:
    """On the CPU operators are over when they return."""

    def query(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait(self) -> None:
        """Nothing to wait for."""


def check_transfer(tensors: Sequence[CacheTensor], block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Raises ValueError when an id is not a block of every tensor, or staging is unfit."""
    num_blocks = min(entry.tensor.shape[0] for entry in tensors)
    for block_id in block_ids.tolist():
        if not 0 <= block_id < num_blocks:
            raise ValueError(f"block id {block_id} where the smallest tensor has {num_blocks} blocks")
    device = tensors[0].tensor.device
    if staging.device != device or not staging.is_contiguous():
        raise ValueError(f"staging must be a contiguous tensor on {device}, it is on {staging.device}")
    wanted = count_staging_bytes(tensors, len(block_ids))
    if staging.nbytes < wanted:
        raise ValueError(f"staging has {staging.nbytes} bytes, {len(block_ids)} blocks need {wanted}")


def record_event(staging: torch.Tensor) -> Event:
    """An event behind what was queued on the current stream; staging's memory is not reused before it."""
    if staging.device.type == "cpu":
        return FinishedEvent()
    import torch

    event: Event = torch.npu.Event()
    event.record()  # type: ignore[attr-defined]  # torch.npu.Event has more than our protocol
    staging.record_stream(torch.npu.current_stream())
    return event


class TorchGroup:
    """The tensors of one cache group, moved by torch operators on the current stream."""

    def __init__(self, tensors: Sequence[CacheTensor]) -> None:
        self._tensors = tuple(tensors)

    def extract(self, block_ids: torch.Tensor, staging: torch.Tensor) -> Event:
        """Gather the blocks into staging."""
        check_transfer(self._tensors, block_ids, staging)
        ids = block_ids.to(staging.device, non_blocking=True)
        for cache, packed in self._pair_views(staging, len(ids)):
            packed.copy_(cache.index_select(0, ids))
        return record_event(staging)

    def inject(self, block_ids: torch.Tensor, staging: torch.Tensor) -> Event:
        """Scatter staging into the blocks."""
        check_transfer(self._tensors, block_ids, staging)
        ids = block_ids.to(staging.device, non_blocking=True)
        for cache, packed in self._pair_views(staging, len(ids)):
            cache.index_copy_(0, ids, packed)
        return record_event(staging)

    def _pair_views(self, staging: torch.Tensor, num_blocks: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each slice of each tensor `[num_blocks, count, elements]` of the cache and of staging."""
        if not num_blocks:
            return
        import torch

        bytes_view = staging.view(-1).view(torch.uint8)
        start = 0
        for entry in self._tensors:
            size = entry.tensor.element_size()
            end = start + entry.packed_bytes * num_blocks
            packed = bytes_view[start:end].view(entry.tensor.dtype)
            start, inside = end, 0
            block, packed_block = entry.block_bytes // size, entry.packed_bytes // size
            for piece in entry.slices:
                if (piece.offset | piece.num_bytes | piece.stride) % size:
                    raise PDConfigError(f"{piece} does not consist of whole elements of {entry.tensor.dtype}")
                width = piece.num_bytes // size
                offset = entry.tensor.storage_offset() + piece.offset // size
                shape = (entry.tensor.shape[0], piece.count, width)
                cache = entry.tensor.as_strided(shape, (block, piece.stride // size or width, 1), offset)
                inner = (num_blocks, piece.count, width)
                at = packed.storage_offset() + inside
                yield cache, packed.as_strided(inner, (packed_block, width, 1), at)
                inside += piece.count * width
