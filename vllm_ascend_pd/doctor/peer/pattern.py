# SPDX-License-Identifier: Apache-2.0
"""What every byte of the test memory must be: pseudo-random by (seed, tensor, block), so that a block in the wrong
place, an old one and a damaged one are told apart. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass


def block_bytes(seed: int, tensor: int, block: int, num_bytes: int) -> bytes:
    """The content of one block."""
    return hashlib.shake_128(f"{seed}/{tensor}/{block}".encode()).digest(num_bytes)


def destinations(num_blocks: int) -> list[int]:
    """Where source block i goes: backwards, so that nothing is right by chance of being copied straight."""
    return list(range(num_blocks - 1, -1, -1))


@dataclass(frozen=True)
class Damage:
    """What is wrong with what arrived."""

    num_blocks: int
    first: str

    def __str__(self) -> str:
        return f"{self.num_blocks} blocks arrived wrong; first: {self.first}"


def find_damage(
    seed: int, num_tensors: int, num_blocks: int, size: int, read: Callable[[int, int], bytes]
) -> Damage | None:
    """Compare all that `read(tensor, destination block)` gives with what was asked for."""
    wrong: list[tuple[int, int, bytes]] = []
    count = 0
    targets = destinations(num_blocks)
    for tensor in range(num_tensors):
        for source, target in enumerate(targets):
            got = read(tensor, target)
            if got != block_bytes(seed, tensor, source, size):
                count += 1
                if not wrong:
                    wrong.append((tensor, source, got))
    if not wrong:
        return None
    tensor, source, got = wrong[0]
    places = ((t, b) for t in range(num_tensors) for b in range(num_blocks))
    return Damage(count, f"tensor {tensor}, block {source}: {_describe(seed, (tensor, source), got, places)}")


def _describe(seed: int, wanted: tuple[int, int], got: bytes, places: Iterable[tuple[int, int]]) -> str:
    if not any(got):
        return "all zero: nothing arrived"
    for tensor, block in places:
        if got == block_bytes(seed, tensor, block, len(got)):
            return f"it holds block {block} of tensor {tensor}"
    expected = block_bytes(seed, *wanted, len(got))
    at = next(index for index, (mine, other) in enumerate(zip(got, expected, strict=True)) if mine != other)
    bad = sum(1 for mine, other in zip(got, expected, strict=True) if mine != other)
    return f"{bad} of {len(got)} bytes differ, from byte {at} on"
