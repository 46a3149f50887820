# SPDX-License-Identifier: Apache-2.0
"""Caches for the kernels' tests: builds their tables, and computes what must come out with tensor indexing only."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

GUARD = 0x5A5A5A5A
GUARD_WORDS = 64


@dataclass(frozen=True)
class Slice:
    """`count` pieces of `piece` words, `stride` apart, from word `offset` of a block on."""

    offset: int
    piece: int
    count: int
    stride: int


@dataclass(frozen=True)
class Shape:
    """One cache tensor: its blocks, the words of one, and which of them are moved."""

    num_blocks: int
    words: int
    slices: tuple[Slice, ...]

    @property
    def packed(self) -> int:
        return sum(part.piece * part.count for part in self.slices)


def whole(num_blocks: int, words: int) -> Shape:
    return Shape(num_blocks, words, (Slice(0, words, 1, words),))


def retiled(num_blocks: int, tokens: int, words: int, split: int) -> Shape:
    """A block [token, head, dim] of `words` a token, that came as [split, token, head / split, dim]."""
    piece = words // split
    return Shape(num_blocks, tokens * words, tuple(Slice(i * piece, piece, tokens, words) for i in range(split)))


@dataclass
class Case:
    """Some tensors, the blocks to move, and the memory for it, each buffer with guard words around it."""

    shapes: list[Shape]
    ids: list[int]
    seed: int = 0
    caches: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)
        self.caches = [self._fill(shape.num_blocks * shape.words) for shape in self.shapes]

    def _fill(self, words: int) -> torch.Tensor:
        made = self.make_guarded(words)
        self.get_inside(made).random_(-(2**31), 2**31 - 1, generator=self._random)
        return made

    @staticmethod
    def make_guarded(words: int) -> torch.Tensor:
        return torch.full((words + 2 * GUARD_WORDS,), GUARD, dtype=torch.int32)

    @staticmethod
    def get_inside(guarded: torch.Tensor) -> torch.Tensor:
        return guarded[GUARD_WORDS:-GUARD_WORDS]

    @property
    def staging_words(self) -> int:
        return len(self.ids) * sum(shape.packed for shape in self.shapes)

    @property
    def num_rows(self) -> int:
        return sum(len(shape.slices) for shape in self.shapes)

    def build_rows(self, caches: list[torch.Tensor]) -> torch.Tensor:
        """The int64 table that a kernel reads, for these guarded tensors."""
        rows, prefix = [], 0
        for shape, cache in zip(self.shapes, caches, strict=True):
            base, inside = self.get_inside(cache).data_ptr(), 0
            for part in shape.slices:
                address = base + 4 * part.offset
                place = [address, shape.words, prefix, shape.packed, inside]
                rows.append([*place, part.piece, part.count, part.stride])
                inside += part.piece * part.count
            prefix += shape.packed
        return torch.tensor(rows, dtype=torch.int64)

    def compute_packed(self) -> torch.Tensor:
        """The staging buffer after extract, without guards."""
        parts = []
        for shape, cache in zip(self.shapes, self.caches, strict=True):
            blocks = self.get_inside(cache).reshape(shape.num_blocks, shape.words)
            for block in self.ids:
                for part in shape.slices:
                    size, stride = (part.count, part.piece), (part.stride, 1)
                    parts.append(torch.as_strided(blocks[block, part.offset :], size, stride).reshape(-1))
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)

    def compute_injected(self) -> list[torch.Tensor]:
        """Guarded caches of guard words into which the blocks were injected."""
        made = [self.make_guarded(shape.num_blocks * shape.words) for shape in self.shapes]
        for shape, cache, target in zip(self.shapes, self.caches, made, strict=True):
            source_blocks = self.get_inside(cache).reshape(shape.num_blocks, shape.words)
            target_blocks = self.get_inside(target).reshape(shape.num_blocks, shape.words)
            for block in self.ids:
                for part in shape.slices:
                    size, stride = (part.count, part.piece), (part.stride, 1)
                    source = torch.as_strided(source_blocks[block, part.offset :], size, stride)
                    torch.as_strided(target_blocks[block, part.offset :], size, stride).copy_(source)
        return made


def find_differences(case: Case, launch) -> list[str]:
    """What extract and inject did wrong; `launch(verb, rows, ids, staging, num_rows, num_blocks)` runs a kernel."""
    ids = torch.tensor(case.ids, dtype=torch.int32)
    wrong = []
    staging = case.make_guarded(case.staging_words)
    expected = case.make_guarded(case.staging_words)
    case.get_inside(expected).copy_(case.compute_packed())
    before = [cache.clone() for cache in case.caches]
    launch("extract", case.build_rows(case.caches), ids, case.get_inside(staging), case.num_rows, len(case.ids))
    if not torch.equal(staging, expected):
        wrong.append("extract: staging")
    if not all(map(torch.equal, case.caches, before)):
        wrong.append("extract: wrote a cache")
    targets = [case.make_guarded(shape.num_blocks * shape.words) for shape in case.shapes]
    staging = expected.clone()
    launch("inject", case.build_rows(targets), ids, case.get_inside(staging), case.num_rows, len(case.ids))
    if not all(map(torch.equal, targets, case.compute_injected())):
        wrong.append("inject: caches")
    if not torch.equal(staging, expected):
        wrong.append("inject: wrote the staging buffer")
    return wrong
