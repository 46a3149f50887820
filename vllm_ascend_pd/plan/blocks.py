# SPDX-License-Identifier: Apache-2.0
"""Pair source and destination blocks by (cache group, absolute token offset); never by list index or count.

Equal block sizes only (unlike ones are refused in the handshake); what a group does not keep (outside a sliding
window) is the null block, id 0, on either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ascend_pd.errors import PDError

NULL_BLOCK = 0


class PlanError(PDError):
    """The handoff does not cover what the decode side needs; the load fails, the request does not."""


@dataclass(frozen=True)
class GroupPull:
    """Blocks of one cache group: `src_blocks[i]` of the prefill side goes to `dst_blocks[i]` here."""

    group: int
    src_blocks: tuple[int, ...]
    dst_blocks: tuple[int, ...]

    def check(self) -> None:
        """Asked where a pull is planned, and again by the rank that executes it.

        Raises:
            PlanError: nothing to move (that is a release, not a pull), unlike numbers of blocks, or the null block,
                which holds nobody's tokens: read, it is rubbish; written, it is what padded slots read.
        """
        numbers = (len(self.src_blocks), len(self.dst_blocks))
        if not self.src_blocks or numbers[0] != numbers[1]:
            raise PlanError(f"group {self.group}: {numbers[0]} blocks to read, {numbers[1]} to write")
        if NULL_BLOCK in self.src_blocks or NULL_BLOCK in self.dst_blocks:
            raise PlanError(f"group {self.group}: the null block (0) is never sent nor written")


def plan_pulls(
    block_sizes: Sequence[int],
    src_block_ids: Sequence[Sequence[int]],
    dst_block_ids: Sequence[Sequence[int]],
    start_token: int,
    end_token: int,
) -> tuple[GroupPull, ...]:
    """Pairs for tokens `[start_token, end_token)` of every group; groups with nothing to move are left out.

    `src_block_ids[g][i]` and `dst_block_ids[g][i]` hold tokens `[i * block_sizes[g], (i + 1) * block_sizes[g])`.

    Raises:
        PlanError: unlike numbers of groups, a start inside a block (it would overwrite a block that other requests
            may share), a list that is too short, or a needed block that the prefill side did not keep.
    """
    if not len(block_sizes) == len(src_block_ids) == len(dst_block_ids):
        raise PlanError(f"cache groups differ: {len(src_block_ids)} in the handoff, {len(dst_block_ids)} here")
    pulls = []
    for group, size in enumerate(block_sizes):
        if start_token % size:
            raise PlanError(f"start token {start_token} is inside a block of {size} (group {group})")
        first, last = start_token // size, -(-end_token // size)
        src, dst = src_block_ids[group], dst_block_ids[group]
        if len(src) < last or len(dst) < last:
            raise PlanError(
                f"group {group}: {last} blocks are needed, the handoff has {len(src)}, allocated are {len(dst)}"
            )
        sources, destinations = tuple(src[first:last]), tuple(dst[first:last])
        kept: Sequence[int] = range(first, last)
        if NULL_BLOCK in destinations:  # a sliding window
            kept = [i for i in kept if dst[i] != NULL_BLOCK]
            sources, destinations = tuple(src[i] for i in kept), tuple(dst[i] for i in kept)
        if NULL_BLOCK in sources:
            missing = kept[sources.index(NULL_BLOCK)] * size
            raise PlanError(
                f"group {group}: the prefill side kept nothing of tokens from {missing} on, which are needed"
            )
        if sources:
            pulls.append(GroupPull(group, sources, destinations))
            pulls[-1].check()
    return tuple(pulls)
