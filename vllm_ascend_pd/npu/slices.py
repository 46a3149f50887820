# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a block move: strided slices, and the ones for whole blocks, for a range of heads, for retiling.

Pure, no torch. A slice speaks of a block of one cache tensor; in staging the slices of a block lie packed, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ascend_pd.errors import PDConfigError


@dataclass(frozen=True)
class Slice:
    """`count` pieces of `num_bytes`, `stride` apart, from `offset` on in a block."""

    offset: int
    num_bytes: int
    count: int = 1
    stride: int = 0

    @property
    def packed_bytes(self) -> int:
        """What it takes in staging."""
        return self.num_bytes * self.count


@dataclass(frozen=True)
class BlockShape:
    """One block of a GQA cache tensor: `[num_tokens, num_heads, head_bytes]`, contiguous."""

    num_tokens: int
    num_heads: int
    head_bytes: int

    @property
    def token_bytes(self) -> int:
        """All heads of one token."""
        return self.num_heads * self.head_bytes


def slice_heads(shape: BlockShape, first: int, count: int) -> tuple[Slice, ...]:
    """Heads `[first, first + count)` of every token.

    Raises:
        PDConfigError: the block has no such heads.
    """
    if first < 0 or count < 1 or first + count > shape.num_heads:
        raise PDConfigError(f"heads {first} to {first + count - 1} of a block with {shape.num_heads} heads")
    piece = count * shape.head_bytes
    if count == shape.num_heads:
        return (Slice(0, shape.num_tokens * shape.token_bytes),)
    return (Slice(first * shape.head_bytes, piece, shape.num_tokens, shape.token_bytes),)


def retile_heads(shape: BlockShape, num_splits: int) -> tuple[Slice, ...]:
    """Slices under which inject turns staging's `[split, token, head / split, dim]` into `[token, head, dim]`.

    This is what lies in staging after pulls from `num_splits` ranks, each with its share of the heads.

    Raises:
        PDConfigError: the heads do not divide.
    """
    if num_splits < 1 or shape.num_heads % num_splits:
        raise PDConfigError(f"{shape.num_heads} heads do not divide into {num_splits} splits")
    share = shape.num_heads // num_splits
    return tuple(piece for i in range(num_splits) for piece in slice_heads(shape, i * share, share))
