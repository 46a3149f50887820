# SPDX-License-Identifier: Apache-2.0
"""Where the bytes lie: two pools (paged caches of prefill and decode) and two staging buffers, made once per run.

Each case cuts them anew. A request that does not fit is worked in passes over its layers: the memory of the first
layers serves the next ones. Per layer the work is the same as in one pass; a fused copy becomes one call per pass.
"""

from __future__ import annotations

import array
import random
from dataclasses import dataclass
from typing import Final

from vllm_ascend_pd.bench import native
from vllm_ascend_pd.bench.machine import read_cache_bytes
from vllm_ascend_pd.bench.pool import ALIGNMENT, Pool
from vllm_ascend_pd.bench.ratios import format_bytes
from vllm_ascend_pd.bench.stages.shapes import KVShape
from vllm_ascend_pd.errors import PDConfigError, PDError

PATTERN_SEED: Final = 7
POOL_SHARE: Final = 5  # of 16 parts: two pools of 5, two staging buffers of 3
STAGING_SHARE: Final = 3
ALL_PARTS: Final = 16
MIN_CACHES: Final = 4  # a pool smaller than so many caches would be measured out of the cache


class WrongBytesError(PDError):
    """A method delivered something else. Action: report it; no number of this run is worth anything."""


@dataclass(frozen=True)
class Blocks:
    """One request's blocks in both pools, as every method takes them."""

    src: array.array[int]
    dst: array.array[int]


@dataclass(frozen=True)
class Cut:
    """The memory as one pass of a case sees it."""

    shape: KVShape
    block_size: int
    num_layers: int  # of this pass
    num_blocks: int  # of each tensor in the pools
    num_moved: int
    src: int
    dst: int
    send: int
    receive: int

    @property
    def plane_bytes(self) -> list[int]:
        """Bytes of one block by plane."""
        return [width * self.block_size for width in self.shape.planes]

    @property
    def num_bytes(self) -> int:
        """Payload of the pass."""
        return self.num_layers * self.num_moved * sum(self.plane_bytes)

    def tensors(self, base: int, plane: int, num_blocks: int) -> array.array[int]:
        """Addresses of a plane's tensor in every layer, so many blocks each; layers lie one after another."""
        sizes = self.plane_bytes
        layer_bytes = num_blocks * sum(sizes)
        first = base + num_blocks * sum(sizes[:plane])
        return array.array("Q", [first + layer * layer_bytes for layer in range(self.num_layers)])

    def pieces(self, base: int, plane: int, blocks: array.array[int]) -> array.array[int]:
        """Addresses of the given blocks of a plane in every layer."""
        size = self.plane_bytes[plane]
        inside = [block * size for block in blocks]
        tensors = self.tensors(base, plane, self.num_blocks)
        return array.array("Q", [tensor + offset for tensor in tensors for offset in inside])

    def draw(self, source: random.Random) -> Blocks:
        """Random blocks of both pools, each once."""
        picked = (source.sample(range(self.num_blocks), self.num_moved) for _ in range(2))
        return Blocks(*(array.array("q", blocks) for blocks in picked))

    def verify(self, blocks: Blocks) -> None:
        """Compare every byte that should have arrived, then poison it. Raises WrongBytesError."""
        for plane, size in enumerate(self.plane_bytes):
            targets = self.pieces(self.dst, plane, blocks.dst)
            origins = array.array("Q", [address - self.src for address in self.pieces(self.src, plane, blocks.src)])
            wrong = native.find_wrong_byte(targets, origins, size, PATTERN_SEED)
            if wrong is not None:
                raise WrongBytesError(f"{self.shape.name}: byte {wrong} of plane {plane} is wrong")
            native.poison(targets, size)


class Memory:
    """All memory of a run, touched; the source pool holds the pattern."""

    def __init__(self, max_bytes: int) -> None:
        part = max_bytes // ALL_PARTS // ALIGNMENT * ALIGNMENT
        self.pool_bytes, self.staging_bytes = POOL_SHARE * part, STAGING_SHARE * part
        if part == 0:
            raise PDConfigError(
                f"--max-memory: {max_bytes} bytes are too few, at least {ALL_PARTS * ALIGNMENT} are needed"
            )
        self._pools = [Pool(size) for size in 2 * [self.pool_bytes] + 2 * [self.staging_bytes]]
        self.src, self.dst, self.send, self.receive = (pool.address for pool in self._pools)
        native.fill(self.src, self.pool_bytes, PATTERN_SEED)

    @property
    def is_small(self) -> bool:
        """Whether the pools may be found in the cache."""
        return self.pool_bytes < MIN_CACHES * read_cache_bytes()

    def cut(self, shape: KVShape, block_size: int, num_moved: int, *, one_staging: bool) -> list[Cut] | str:
        """One cut per pass, or why it cannot be done even one layer at a time.

        `one_staging`: inject reads where extract wrote, with nothing pulled between.
        """
        layer_bytes = block_size * sum(shape.planes)  # of one block of one layer
        per_pass = min(
            shape.num_layers,
            self.staging_bytes // (layer_bytes * num_moved),
            self.pool_bytes // (layer_bytes * (num_moved + 1)),
        )
        if per_pass == 0:
            return (
                f"one layer of {num_moved} blocks is {format_bytes(layer_bytes * num_moved)}; a pool has "
                f"{format_bytes(self.pool_bytes)}, a staging buffer {format_bytes(self.staging_bytes)} (--max-memory)"
            )
        num_passes = -(-shape.num_layers // per_pass)
        even, extra = divmod(shape.num_layers, num_passes)
        receive = self.send if one_staging else self.receive
        cuts = []
        for index in range(num_passes):
            layers = even + (index < extra)
            num_blocks = self.pool_bytes // (layer_bytes * layers)
            places = self.src, self.dst, self.send, receive
            cuts.append(Cut(shape, block_size, layers, num_blocks, num_moved, *places))
        return cuts
