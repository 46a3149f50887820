# SPDX-License-Identifier: Apache-2.0
"""Pure planning: which tensors and blocks of both sides one pull or push moves; no step per block happens here.

The C++ plane merges adjacent blocks and checks every block of both sides against its cache, also those that the real
engine only checks for the first block of a run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

from vllm_ascend_pd.datadist.status import require
from vllm_ascend_pd.native.plane import find_range

_MAX_REQUEST_WORDS: Final = 131064  # tensors + 2 * runs. Source: datadist-api.md §4.8


def max_request_words() -> int:
    """What one request may name."""
    return _MAX_REQUEST_WORDS


def to_block_array(blocks: Sequence[int]) -> array[int]:
    """The ids as the plane takes them."""
    return blocks if isinstance(blocks, array) else array("q", blocks)


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


def check_blocks(side: str, blocks: Any, num_blocks: int) -> None:
    """Raise LLMException unless every block is inside the cache."""
    if len(blocks):
        low, high = find_range(to_block_array(blocks))
        outside = low if low < 0 else high
        require(low >= 0 and high < num_blocks, f"{side} block {outside} of a cache of {num_blocks} blocks")


def split_into_blocks(num_bytes: int, num_blocks: int, block_bytes: int) -> tuple[array[int], int]:
    """Contiguous source bytes cut into blocks, in order: their ids, and the bytes of the last (§4.3, C->B)."""
    last = num_bytes - (num_blocks - 1) * block_bytes
    require(
        last > 0,
        f"{num_blocks} destination blocks of {block_bytes} bytes for {num_bytes} source bytes",
    )
    return array("q", range(num_blocks)), min(last, block_bytes)
