# SPDX-License-Identifier: Apache-2.0
"""Pure planning: which bytes of which tensors one pull or push moves, adjacent blocks merged into runs.

Every bound is checked here, also those that the real engine only checks for the first block of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vllm_ascend_pd.datadist.status import require

_MAX_REQUEST_WORDS: Final = 131064  # tensors + 2 * runs. Source: datadist-api.md §4.8


@dataclass(frozen=True)
class Shape:
    """What planning needs to know of either side's cache."""

    num_tensors: int
    tensor_bytes: int
    num_slots: int

    @property
    def slot_bytes(self) -> int:
        """Distance between two blocks or batch slots."""
        return self.tensor_bytes // self.num_slots


@dataclass(frozen=True)
class Runs:
    """The same runs in each tensor: i-th source tensor to i-th destination tensor."""

    src_tensors: range
    dst_tensors: range
    src_offsets: list[int]
    dst_offsets: list[int]
    sizes: list[int]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(self.sizes) * len(self.src_tensors)

    def check_size(self) -> None:
        """Raise LLMException when the request does not fit the engine's message."""
        words = len(self.src_tensors) + 2 * len(self.sizes)
        require(
            words <= _MAX_REQUEST_WORDS,
            f"{len(self.src_tensors)} tensors and {len(self.sizes)} runs exceed one request",
        )


def select_tensors(
    local: int, remote: int, src_layers: range | None, dst_layers: range | None, tensors_per_layer: int
) -> tuple[range, range]:
    """Source (remote) and destination (local) tensor indices of a pull (§4.3, layer selection)."""
    if src_layers is None and dst_layers is None:
        require(local == remote, f"the local cache has {local} tensors, the remote one {remote}")
        return range(remote), range(local)
    per_layer = tensors_per_layer
    require(local % per_layer == 0, f"{local} local tensors are not a multiple of {per_layer} per layer")
    dst = range(local) if dst_layers is None else _to_tensors(dst_layers, per_layer)
    src = range(remote) if src_layers is None else _to_tensors(src_layers, per_layer)
    require(len(src) == len(dst), f"{len(src)} source tensors for {len(dst)} destination tensors")
    require(dst.stop <= local, f"destination layers {dst_layers} of a cache of {local} tensors")
    require(src.stop <= remote, f"source layers {src_layers} of a cache of {remote} tensors")
    return src, dst


def _to_tensors(layers: range, per_layer: int) -> range:
    return range(layers.start * per_layer, layers.stop * per_layer)


def check_blocks(side: str, blocks: Sequence[int], num_blocks: int) -> None:
    """Raise LLMException unless every block is inside the cache."""
    if blocks:
        low, high = min(blocks), max(blocks)
        require(low >= 0 and high < num_blocks, f"{side} block {high} of a cache of {num_blocks} blocks")


def pair_blocks(
    src_blocks: Sequence[int], dst_blocks: Sequence[int], block_bytes: int
) -> tuple[list[int], list[int], list[int]]:
    """Offsets and sizes of the runs: consecutive pairs (both +1) become one."""
    src_offsets: list[int] = []
    dst_offsets: list[int] = []
    sizes: list[int] = []
    last_src = last_dst = -2
    for src, dst in zip(src_blocks, dst_blocks, strict=True):
        if src == last_src + 1 and dst == last_dst + 1:
            sizes[-1] += block_bytes
        else:
            src_offsets.append(src * block_bytes)
            dst_offsets.append(dst * block_bytes)
            sizes.append(block_bytes)
        last_src, last_dst = src, dst
    return src_offsets, dst_offsets, sizes


def split_into_blocks(
    src_start: int, num_bytes: int, dst_blocks: Sequence[int], block_bytes: int
) -> tuple[list[int], list[int], list[int]]:
    """Contiguous source bytes to blocks, in order; the last block may get only a remainder (§4.3, C->B)."""
    capacity = len(dst_blocks) * block_bytes
    require(
        capacity - block_bytes < num_bytes,
        f"{len(dst_blocks)} destination blocks of {block_bytes} bytes for {num_bytes} source bytes",
    )
    src_offsets = [src_start + index * block_bytes for index in range(len(dst_blocks))]
    dst_offsets = [block * block_bytes for block in dst_blocks]
    sizes = [min(block_bytes, num_bytes - index * block_bytes) for index in range(len(dst_blocks))]
    return src_offsets, dst_offsets, sizes
