# SPDX-License-Identifier: Apache-2.0
"""Extract and inject through Triton's own launcher, where the extension is absent but triton-ascend is installed.

The same kernels and the same table of rows as the extension's. Triton launches on the current stream; the block ids
are copied to the device before it, from page-locked memory and without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.npu import triton_kernels
from vllm_ascend_pd.npu.fallback import check_transfer, record_event
from vllm_ascend_pd.npu.layers import CacheTensor

if TYPE_CHECKING:
    import torch

    from vllm_ascend_pd.npu.extension import Event

WORD_BYTES: Final = 4
SHORT_PIECE_WORDS: Final = 512  # as kShortPieceWords of csrc_npu/npu/table.h
DEFAULT_GRID: Final = 40  # vector cores of a 910B; any grid is right


def make_rows(tensors: Sequence[CacheTensor]) -> list[list[int]]:
    """The table that the kernels read, in the order of `triton_kernels.ROW_FIELDS`.

    Raises:
        PDConfigError: something is not whole 32-bit words.
    """
    rows, prefix = [], 0
    for entry in tensors:
        inside = 0
        for piece in entry.slices:
            stride = piece.stride if piece.count > 1 else 0
            row = [entry.block_bytes, prefix, entry.packed_bytes, inside, piece.num_bytes, stride]
            address = entry.tensor.data_ptr() + piece.offset
            if any(value % WORD_BYTES for value in (address, *row)):
                raise PDConfigError(f"{piece} of a tensor at {address:#x} is not whole 32-bit words")
            words = [value // WORD_BYTES for value in row]
            rows.append([address, *words[:5], piece.count, words[5]])
            inside += piece.packed_bytes
        prefix += entry.packed_bytes
    return rows


class TritonGroup:
    """The tensors of one cache group, prepared for the Triton kernels."""

    def __init__(self, tensors: Sequence[CacheTensor], grid: int = DEFAULT_GRID) -> None:
        import torch

        self._tensors = tuple(tensors)
        self._grid = grid
        rows = make_rows(tensors)
        short = all(row[6] > 1 and row[5] <= SHORT_PIECE_WORDS for row in rows)
        self._suffix = "_pieces" if short else ""
        self._rows = torch.tensor(rows, dtype=torch.int64).to(tensors[0].tensor.device)
        self._kernels: dict[str, Any] = triton_kernels.load_kernels()

    def extract(self, block_ids: torch.Tensor, staging: torch.Tensor) -> Event:
        """Gather the blocks into staging."""
        return self._launch("pd_kv_extract", block_ids, staging)

    def inject(self, block_ids: torch.Tensor, staging: torch.Tensor) -> Event:
        """Scatter staging into the blocks."""
        return self._launch("pd_kv_inject", block_ids, staging)

    def _launch(self, name: str, block_ids: torch.Tensor, staging: torch.Tensor) -> Event:
        import torch

        check_transfer(self._tensors, block_ids, staging)
        if len(block_ids) == 0:
            return record_event(staging)
        name += self._suffix
        tile = triton_kernels.TILES[name]
        host = block_ids.to(torch.int32)
        ids = (host if staging.device.type == "cpu" else host.pin_memory()).to(staging.device, non_blocking=True)
        words = staging.view(-1).view(torch.int32)
        counts = (len(self._rows), len(ids))
        self._kernels[name][(self._grid,)](self._rows, ids, words, *counts, tile.rows, tile.cols)
        return record_event(staging)
