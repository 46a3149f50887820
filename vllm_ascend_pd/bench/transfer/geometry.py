# SPDX-License-Identifier: Apache-2.0
"""Which pieces a pull moves: pure, standard library only, the same in every process for the same seed.

A pool is cut like a paged KV cache: tensors (layers x K and V) that lie one after the other, each of equal blocks. A
pull takes the same random blocks from every tensor and puts them into other random blocks, so a piece is one block
of one tensor. Every contender moves exactly these pieces.
"""

from __future__ import annotations

import array
import random
from dataclasses import dataclass
from typing import Final

from vllm_ascend_pd.errors import PDConfigError

TENSOR_ALIGNMENT: Final = 2 << 20  # what llm_datadist wants of a registered base


@dataclass(frozen=True)
class Layout:
    """A pool cut for one piece size."""

    piece_bytes: int
    num_tensors: int
    num_blocks: int  # of each tensor
    num_moved: int  # blocks that one pull takes from each tensor

    @property
    def tensor_bytes(self) -> int:
        """From one tensor to the next."""
        return self.num_blocks * self.piece_bytes

    @property
    def num_pieces(self) -> int:
        """Of one pull."""
        return self.num_tensors * self.num_moved


@dataclass(frozen=True)
class Geometry:
    """Sizes of a run; `check` before use."""

    pool_bytes: int
    payload_bytes: int
    max_tensors: int
    order: str = "random"  # or "sequential": block ids without gaps, as after a fresh start

    def check(self, pieces: list[int]) -> None:
        """Raises PDConfigError."""
        if self.pool_bytes < 2 * self.payload_bytes or self.pool_bytes % self.payload_bytes:
            raise PDConfigError(
                f"--pool-mib must be a multiple of --payload-mib, at least twice: {self.pool_bytes >> 20} MiB "
                f"for a payload of {self.payload_bytes >> 20} MiB"
            )
        for piece in pieces:
            if piece % 64 or self.payload_bytes % piece:
                raise PDConfigError(
                    f"--pieces: {piece} bytes is not a multiple of 64 that divides the payload of "
                    f"{self.payload_bytes} bytes"
                )

    def layout(self, piece_bytes: int) -> Layout:
        """As many tensors as divide the payload and leave every base aligned, at most `max_tensors`."""
        num_pieces = self.payload_bytes // piece_bytes
        tensors = 1
        while (
            tensors * 2 <= self.max_tensors
            and num_pieces % (tensors * 2) == 0
            and self.pool_bytes % (tensors * 2 * TENSOR_ALIGNMENT) == 0
        ):
            tensors *= 2
        return Layout(piece_bytes, tensors, self.pool_bytes // tensors // piece_bytes, num_pieces // tensors)


@dataclass(frozen=True)
class Request:
    """One pull: block ids as `pull_blocks` takes them, and the same as offsets into the pools, tensor by tensor."""

    layout: Layout
    src_blocks: list[int]
    dst_blocks: list[int]
    src_offsets: array.array[int]
    dst_offsets: array.array[int]

    @property
    def num_bytes(self) -> int:
        """Payload."""
        return self.layout.num_pieces * self.layout.piece_bytes


def draw_request(geometry: Geometry, piece_bytes: int, seed: int) -> Request:
    """The pieces of the pull with this seed."""
    layout = geometry.layout(piece_bytes)
    source = random.Random(f"{seed} {piece_bytes}")
    if geometry.order == "sequential":
        starts = [source.randrange(layout.num_blocks - layout.num_moved + 1) for _ in range(2)]
        src_blocks, dst_blocks = ([*range(start, start + layout.num_moved)] for start in starts)
    else:
        src_blocks, dst_blocks = (source.sample(range(layout.num_blocks), layout.num_moved) for _ in range(2))
    return Request(layout, src_blocks, dst_blocks, _to_offsets(layout, src_blocks), _to_offsets(layout, dst_blocks))


def _to_offsets(layout: Layout, blocks: list[int]) -> array.array[int]:
    inside = [block * layout.piece_bytes for block in blocks]
    bases = range(0, layout.num_tensors * layout.tensor_bytes, layout.tensor_bytes)
    return array.array("Q", [base + offset for base in bases for offset in inside])


def shift(offsets: array.array[int], base: int) -> array.array[int]:
    """Offsets into addresses."""
    return array.array("Q", [base + offset for offset in offsets])
