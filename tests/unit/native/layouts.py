# SPDX-License-Identifier: Apache-2.0
"""Random KV layouts for both sides of a copy, and a naive model that moves one token of one head at a time."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from vllm_ascend_pd.native.copying import BlockSlice, CopyGroup, CopyPlan

GUARD = 192  # bytes around every tensor that no copy may change


@dataclass(frozen=True)
class Side:
    """A pool of blocks `[num_blocks, block_size, num_heads, head_bytes]` per tensor (or heads before tokens)."""

    num_blocks: int
    block_size: int
    num_heads: int
    heads_first: bool

    def token_stride(self, head_bytes: int) -> int:
        return head_bytes if self.heads_first else head_bytes * self.num_heads

    def head_stride(self, head_bytes: int) -> int:
        return head_bytes * self.block_size if self.heads_first else head_bytes

    def block_bytes(self, head_bytes: int) -> int:
        return self.block_size * self.num_heads * head_bytes


@dataclass(frozen=True)
class Case:
    """`num_heads` heads from `src_head` on become `dst_head` on; `num_tokens` tokens along both block lists."""

    src: Side
    dst: Side
    src_blocks: tuple[int, ...]
    dst_blocks: tuple[int, ...]
    head_bytes: int
    num_heads: int
    src_head: int
    dst_head: int
    num_tokens: int
    num_tensors: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    unit = draw(st.sampled_from([1, 2, 4]))
    src_size, dst_size = unit * draw(st.sampled_from([1, 2, 8])), unit * draw(st.sampled_from([1, 2, 8]))
    num_heads = draw(st.integers(1, 3))
    src_head, dst_head = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    heads_first, same_order = draw(st.booleans()), draw(st.booleans())
    dst_first = heads_first if same_order else not heads_first
    src = Side(12, src_size, src_head + num_heads + draw(st.integers(0, 1)), heads_first)
    dst = Side(
        12,
        dst_size,
        dst_head + num_heads + draw(st.integers(0, 1)),
        dst_first,
    )
    num_tokens = unit * draw(st.integers(1, min(src_size, dst_size) * 12 // unit))
    ids = st.permutations(range(12)) if draw(st.booleans()) else st.just(list(range(12)))
    src_blocks, dst_blocks = draw(ids)[: -(-num_tokens // src_size)], draw(ids)[: -(-num_tokens // dst_size)]
    head_bytes = draw(st.sampled_from([1, 6, 64, 128, 320]))
    return Case(
        src, dst, tuple(src_blocks), tuple(dst_blocks), head_bytes, num_heads, src_head, dst_head, num_tokens,
        draw(st.integers(1, 3)),
    )  # fmt: skip


class Memory:
    """Tensors of one side, each between guards, with random bytes all over."""

    def __init__(self, side: Side, case: Case, seed: int) -> None:
        self.side = side
        self.num_bytes = side.num_blocks * side.block_bytes(case.head_bytes)
        random = np.random.default_rng(seed)
        self.tensors = [random.integers(0, 256, self.num_bytes + 2 * GUARD, np.uint8) for _ in range(case.num_tensors)]

    def addresses(self) -> array[int]:
        return array("Q", [tensor.ctypes.data + GUARD for tensor in self.tensors])

    def offset(self, block: int, token: int, head: int, head_bytes: int) -> int:
        side = self.side
        inside = token * side.token_stride(head_bytes) + head * side.head_stride(head_bytes)
        return GUARD + block * side.block_bytes(head_bytes) + inside


def copy_naively(case: Case, src: Memory, dst: Memory) -> list[np.ndarray]:
    """What the destination's tensors must be afterwards, guards included."""
    wanted = [tensor.copy() for tensor in dst.tensors]
    size = case.head_bytes
    for token in range(case.num_tokens):
        src_block, src_token = case.src_blocks[token // case.src.block_size], token % case.src.block_size
        dst_block, dst_token = case.dst_blocks[token // case.dst.block_size], token % case.dst.block_size
        for head in range(case.num_heads):
            from_ = src.offset(src_block, src_token, case.src_head + head, size)
            to = dst.offset(dst_block, dst_token, case.dst_head + head, size)
            for index, tensor in enumerate(src.tensors):
                wanted[index][to : to + size] = tensor[from_ : from_ + size]
    return wanted


def add_case(plan: CopyPlan, case: Case, src: Memory, dst: Memory) -> None:
    """Units of tokens that are whole on both sides; slices repeat over the heads, shifts place a unit in its block."""
    size = case.head_bytes
    unit = np.gcd(np.gcd(case.src.block_size, case.dst.block_size), case.num_tokens)
    starts = range(0, case.num_tokens, int(unit))
    slices = [
        BlockSlice(
            case.src_head * case.src.head_stride(size) + token * case.src.token_stride(size),
            case.dst_head * case.dst.head_stride(size) + token * case.dst.token_stride(size),
            size,
            case.num_heads,
            case.src.head_stride(size),
            case.dst.head_stride(size),
        )
        for token in range(int(unit))
    ]
    group = CopyGroup(
        src.addresses(),
        dst.addresses(),
        0,
        src_block_stride=case.src.block_bytes(size),
        dst_block_stride=case.dst.block_bytes(size),
        slices=slices,
    )
    plan.add_group(
        group,
        array("q", [case.src_blocks[start // case.src.block_size] for start in starts]),
        [case.dst_blocks[start // case.dst.block_size] for start in starts],
        src_shifts=[start % case.src.block_size * case.src.token_stride(size) for start in starts],
        dst_shifts=np.array([start % case.dst.block_size * case.dst.token_stride(size) for start in starts]),
    )
