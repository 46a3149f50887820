# SPDX-License-Identifier: Apache-2.0
"""The device's copier on CPU tensors: the same bytes as the host's, one launch where all parts take the same blocks."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from vllm_ascend_pd.npu import ops
from vllm_ascend_pd.npu.order import HostOrder
from vllm_ascend_pd.transfer.staging.chunks import Part
from vllm_ascend_pd.transfer.staging.copier import HostCopier, StagingError
from vllm_ascend_pd.transfer.staging.device import DeviceCopier, DeviceMemory

NUM_BLOCKS = 20
SHAPES = (4096, 4096, 512, 512, 128)
STAGING_BYTES = 1 << 18
SOON = float("inf")


class World:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tensors = [
            torch.randint(0, 256, (NUM_BLOCKS, size), generator=generator, dtype=torch.uint8) for size in SHAPES
        ]
        self.memory = DeviceMemory(STAGING_BYTES, "cpu")
        self.memory.tensor.zero_()
        self.calls: list[int] = []
        blocks = {tensor.data_ptr(): tensor for tensor in self.tensors}
        self.copier = DeviceCopier(blocks, self.memory.tensor, HostOrder())

    def parts(self, *items: tuple[list[int], tuple[int, ...]]) -> list[Part]:
        """Of (tensors of one shape, blocks)."""
        made, offset = [], 0
        for indices, blocks in items:
            size = SHAPES[indices[0]]
            made.append(Part(tuple(self.tensors[i].data_ptr() for i in indices), size, blocks, offset))
            offset += size * len(blocks) * len(indices)
        return made


@pytest.fixture
def world(monkeypatch) -> World:
    made = World()
    for name in ("extract", "inject"):
        operation = getattr(ops, name)

        def count(tensors, *rest, operation=operation):
            made.calls.append(len(tensors))
            return operation(tensors, *rest)

        monkeypatch.setattr(ops, name, count)
    return made


SAME = [([0, 1], (3, 9, 4)), ([2, 3], (3, 9, 4)), ([4], (3, 9, 4))]
UNLIKE = [([0], (3, 9)), ([2, 3], (5,)), ([4], (5,))]


@pytest.mark.parametrize(("items", "calls"), [(SAME, [5]), (UNLIKE, [1, 3])], ids=["same blocks", "unlike blocks"])
@pytest.mark.parametrize("slot", [0, 1 << 16])
def test_extract_and_inject_are_the_hosts_with_a_launch_for_each_set_of_blocks(world: World, items, calls, slot):
    parts, address = world.parts(*items), world.memory.address + slot
    world.copier.extract(parts, address, SOON)
    got = world.memory.tensor.clone()
    world.memory.tensor.zero_()
    HostCopier().extract(parts, address, SOON)
    assert torch.equal(got, world.memory.tensor)
    assert got.any()
    assert world.calls == calls

    staged = random.Random(1).randbytes(STAGING_BYTES)
    ctypes.memmove(world.memory.address, staged, STAGING_BYTES)
    before = [tensor.clone() for tensor in world.tensors]
    HostCopier().inject(parts, address, SOON)
    wanted = [tensor.clone() for tensor in world.tensors]
    for tensor, old in zip(world.tensors, before, strict=True):
        tensor.copy_(old)
    world.copier.inject(parts, address, SOON)
    assert all(torch.equal(a, b) for a, b in zip(world.tensors, wanted, strict=True))
    assert world.calls == calls * 2


def test_a_part_inside_staging_is_what_the_probe_of_a_link_moves(world: World):
    base = world.memory.address
    world.memory.tensor[:64] = torch.arange(64, dtype=torch.uint8)
    world.copier.inject([Part((base + 4096,), 16, (2, 0, 3, 1), 0)], base, SOON)
    spread = world.memory.tensor[4096 : 4096 + 64].view(4, 16)
    assert spread[:, 0].tolist() == [16, 48, 0, 32]


def test_what_is_not_registered_or_not_there_is_refused_and_nothing_moves(world: World):
    before = [tensor.clone() for tensor in world.tensors]
    with pytest.raises(StagingError, match="no registered tensor begins at 0x1000"):
        world.copier.inject([Part((0x1000,), 512, (1,), 0)], world.memory.address, SOON)
    with pytest.raises(StagingError, match=f"block id {NUM_BLOCKS}"):
        world.copier.inject(world.parts(([0], (NUM_BLOCKS,))), world.memory.address, SOON)
    assert all(torch.equal(a, b) for a, b in zip(world.tensors, before, strict=True))


def test_a_deadline_that_has_passed_launches_nothing(world: World):
    with pytest.raises(StagingError, match="deadline"):
        world.copier.extract(world.parts(*SAME), world.memory.address, 0.0)
    assert world.calls == []


def test_a_launch_that_failed_is_reported_after_the_others_are_over(world: World, monkeypatch):
    waited: list[int] = []

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            waited.append(self.number)
            if self.number == 0:
                raise RuntimeError("507018")

    events = iter((Event(0), Event(1)))
    monkeypatch.setattr(ops, "extract", lambda *_: next(events))
    with pytest.raises(StagingError, match="507018"):
        world.copier.extract(world.parts(*UNLIKE), world.memory.address, SOON)
    assert waited == [0, 1]
