# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, ANN202
"""Extract and inject of KV blocks as Triton kernels for the vector cores of an NPU: one launch for all tensors.

Owns the kernels and the layout of the table that they read. Importing this module needs no Triton: the kernels are
plain functions until `load_kernels` compiles them. The parameters of a kernel carry no types, because Triton reads
annotations as its own.

A task is one block of one row, and a row is one slice of one cache tensor: `count` pieces of `piece_words` each, that
lie `stride_words` apart in the cache and one after the other in the staging buffer. A whole block is one row with
`count` 1. Heads of a pull with unlike tensor parallelism are retiled by inject with one row per source:
`[split, token, head / split, dim]` in the staging buffer becomes `[token, head, dim]` in the cache. Rows may differ in
every field, as the tensors of MLA do. Everything is counted in 32-bit words; offsets are 64-bit. What lies outside a
mask is neither read nor written, and needs no filling of the buffer: `care_padding=False` of triton-ascend.

Staging buffer: tensor by tensor, in each its blocks one after the other, in each its slices, packed.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any, Final

tl: Any = None  # triton.language, once `load_kernels` ran; Triton resolves the name in this module's globals

# Fields of a row of the int64 table, in this order.
ROW_FIELDS: Final = (
    "address",  # bytes: base of the cache tensor plus where this slice begins in a block
    "block_words",  # between two blocks of the tensor
    "prefix_words",  # packed words per block of all tensors before this one
    "packed_words",  # packed words per block of this tensor, all its slices
    "slice_words",  # where this slice begins in the packed block
    "piece_words",  # of one contiguous piece
    "count",  # pieces
    "stride_words",  # between two pieces in the cache
)
NUM_FIELDS: Final = len(ROW_FIELDS)
# name -> type, in the order of the launch; the tile's sides come after these and are constants of the compilation.
SIGNATURE: Final = {
    "rows": "*i64",
    "block_ids": "*i32",
    "staging": "*i32",
    "num_rows": "i32",
    "num_blocks": "i32",
}


@dataclass(frozen=True)
class Tile:
    """What one step moves through the unified buffer: up to `rows` pieces, up to `cols` words of each.

    Two tiles are in flight (double buffering). 8,192 words are 32 KiB, so that both fit in 64 KiB of the 192 KiB.
    """

    rows: int
    cols: int

    @property
    def buffered_bytes(self) -> int:
        """Bytes of both tiles."""
        return 2 * 4 * self.rows * self.cols


# The kernels that are shipped, each with its tile. `_pieces` moves many short pieces with one strided transfer, for
# rows whose pieces are far shorter than a tile (a head of one token); the other two are for whole blocks.
TILES: Final = {
    "pd_kv_extract": Tile(1, 8192),
    "pd_kv_inject": Tile(1, 8192),
    "pd_kv_extract_pieces": Tile(128, 64),
    "pd_kv_inject_pieces": Tile(128, 64),
}


def copy_runs(rows, block_ids, staging, num_rows, num_blocks, EXTRACT: tl.constexpr, COLS: tl.constexpr):
    """Walks the tasks of this program; each step moves up to COLS words of one piece."""
    lane = tl.arange(0, COLS)
    for task in range(tl.program_id(0), num_rows * num_blocks, tl.num_programs(0)):
        row = rows + (task // num_blocks) * 8
        index = task % num_blocks
        block = tl.load(block_ids + index).to(tl.int64)
        cache = tl.load(row).to(tl.pointer_type(tl.int32)) + block * tl.load(row + 1)
        packed = staging + tl.load(row + 2) * num_blocks + index * tl.load(row + 3) + tl.load(row + 4)
        piece = tl.load(row + 5).to(tl.int32)
        count = tl.load(row + 6).to(tl.int32)
        stride = tl.load(row + 7)
        steps = (piece + COLS - 1) // COLS
        # One flat loop: the compiler overlaps the steps of the innermost loop only.
        for step in range(0, count * steps):
            number = step // steps
            column = (step % steps) * COLS
            inside = (column + lane) < piece
            spread = cache + number * stride + column + lane
            dense = packed + number * tl.cast(piece, tl.int64) + column + lane
            if EXTRACT:
                tl.store(dense, tl.load(spread, mask=inside, care_padding=False), mask=inside)
            else:
                tl.store(spread, tl.load(dense, mask=inside, care_padding=False), mask=inside)


def copy_pieces(
    rows, block_ids, staging, num_rows, num_blocks, EXTRACT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Walks the tasks of this program; each step moves up to COLS words of each of up to ROWS pieces."""
    lane = tl.arange(0, COLS)[None, :]
    line = tl.arange(0, ROWS)[:, None]
    for task in range(tl.program_id(0), num_rows * num_blocks, tl.num_programs(0)):
        row = rows + (task // num_blocks) * 8
        index = task % num_blocks
        block = tl.load(block_ids + index).to(tl.int64)
        cache = tl.load(row).to(tl.pointer_type(tl.int32)) + block * tl.load(row + 1)
        packed = staging + tl.load(row + 2) * num_blocks + index * tl.load(row + 3) + tl.load(row + 4)
        piece = tl.load(row + 5).to(tl.int32)
        count = tl.load(row + 6).to(tl.int32)
        stride = tl.load(row + 7)
        steps = (piece + COLS - 1) // COLS
        for step in range(0, steps * ((count + ROWS - 1) // ROWS)):
            number = (step // steps) * ROWS
            column = (step % steps) * COLS
            inside = ((number + line) < count) & ((column + lane) < piece)
            # Inside a tile 32 bits are enough (and what the compiler makes one strided transfer of).
            spread = cache + number * stride + column + line * stride.to(tl.int32) + lane
            dense = packed + number * tl.cast(piece, tl.int64) + column + line * piece + lane
            if EXTRACT:
                tl.store(dense, tl.load(spread, mask=inside, care_padding=False), mask=inside)
            else:
                tl.store(spread, tl.load(dense, mask=inside, care_padding=False), mask=inside)


def pd_kv_extract(rows, block_ids, staging, num_rows, num_blocks, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Cache blocks into the staging buffer; for long pieces. ROWS is 1."""
    copy_runs(rows, block_ids, staging, num_rows, num_blocks, True, COLS)


def pd_kv_inject(rows, block_ids, staging, num_rows, num_blocks, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The staging buffer into cache blocks; for long pieces. ROWS is 1."""
    copy_runs(rows, block_ids, staging, num_rows, num_blocks, False, COLS)


def pd_kv_extract_pieces(rows, block_ids, staging, num_rows, num_blocks, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Cache blocks into the staging buffer; for many short pieces."""
    copy_pieces(rows, block_ids, staging, num_rows, num_blocks, True, ROWS, COLS)


def pd_kv_inject_pieces(rows, block_ids, staging, num_rows, num_blocks, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The staging buffer into cache blocks; for many short pieces, so this one retiles heads."""
    copy_pieces(rows, block_ids, staging, num_rows, num_blocks, False, ROWS, COLS)


def load_kernels() -> dict[str, Any]:
    """The kernels by name, ready for `kernel[(grid,)](rows, block_ids, staging, num_rows, num_blocks, ROWS, COLS)`.

    Any grid is right; the number of vector cores is the fast one, as each program walks over the tasks.

    Raises:
        ImportError: no usable Triton is installed.
    """
    module = sys.modules[__name__]
    if tl is None:
        triton = importlib.import_module("triton")
        compiled = {name: triton.jit(getattr(module, name)) for name in ("copy_runs", "copy_pieces")}
        # Otherwise Triton compiles anew for counts that are 1 or multiples of 16, in the middle of a request.
        for name in TILES:
            compiled[name] = triton.jit(getattr(module, name), do_not_specialize=["num_rows", "num_blocks"])
        vars(module).update(compiled, tl=importlib.import_module("triton.language"))
    return {name: getattr(module, name) for name in TILES}
