# SPDX-License-Identifier: Apache-2.0
"""Order between the model's steps and staging, with the model's stream held as long as anything else can go on.

The model is a copy into cache blocks on a stream of its own. Each right way passes; without the mark the same test
sees what the mark is for.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.npu.caches import make_layers, take_blocks, to_device
from tests.npu.test_ordering import pin
from vllm_ascend_pd.npu.order import NpuOrder
from vllm_ascend_pd.transfer.staging.chunks import Part
from vllm_ascend_pd.transfer.staging.device import DeviceCopier, DeviceMemory

IDS = (3, 4, 17, 9)
BYTES = 1 << 20


class World:
    """A cache of K and V on the device, its staging memory, and a model that writes blocks."""

    def __init__(self, device: str) -> None:
        self.host = make_layers("gqa", seed=1)
        self.layers = to_device(self.host, device)
        tensors = [tensor for layer in self.layers for tensor in layer]
        self.order = NpuOrder(device)
        self.memory = DeviceMemory(BYTES, device)
        blocks = {t.data_ptr(): t.view(len(t), -1) for t in tensors}
        self.copier = DeviceCopier(blocks, self.memory.tensor, self.order)
        self.part = Part(tuple(blocks), tensors[0][0].nbytes, IDS, 0)
        self.model = torch.npu.Stream()
        self.written = make_layers("gqa", seed=2)  # what the model writes
        self._pinned = [pin(t) for layer in self.written for t in layer]
        self.copier.extract([self.part], self.memory.address, time.monotonic() + 20)  # prepares
        torch.npu.synchronize()

    def write(self, *, marks: bool) -> None:
        """A step: all blocks are written on the model's stream."""
        with torch.npu.stream(self.model):
            for tensor, source in zip((t for layer in self.layers for t in layer), self._pinned, strict=True):
                tensor.copy_(source, non_blocking=True)
            if marks:
                self.order.mark()

    def run(self, operation, standin) -> None:
        """In a thread of its own, as the data plane does."""
        errors: list[Exception] = []

        def work() -> None:
            try:
                operation([self.part], self.memory.address, time.monotonic() + 20)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        standin.let_go()
        thread.join(20)
        assert (thread.is_alive(), errors) == (False, [])

    def staged(self) -> torch.Tensor:
        return self.memory.tensor[: self.size()].cpu()

    def size(self) -> int:
        return self.part.block_bytes * len(IDS) * len(self.part.tensors)


@pytest.mark.parametrize("marks", [True, False])
def test_extract_sees_what_the_model_has_written_before_the_mark(device, standin, backend, marks):
    world = World(device)
    standin.hold(world.model)
    world.write(marks=marks)
    world.run(world.copier.extract, standin)
    assert torch.equal(world.staged(), take_blocks(world.written, list(IDS))) == marks


@pytest.mark.parametrize("marks", [True, False])
def test_inject_comes_after_what_an_earlier_step_still_writes(device, standin, backend, marks):
    """The blocks were another request's when that step was launched."""
    world, pulled = World(device), make_layers("gqa", seed=3)
    wanted = take_blocks(pulled, list(IDS))
    world.memory.tensor[: world.size()].copy_(wanted)
    torch.npu.synchronize()
    standin.hold(world.model)
    world.write(marks=marks)
    world.run(world.copier.inject, standin)
    torch.npu.synchronize()
    found = take_blocks([tuple(t.cpu() for t in layer) for layer in world.layers], list(IDS))
    assert torch.equal(found, wanted) == marks


@pytest.mark.parametrize("marks", [True, False])
def test_a_pull_that_writes_blocks_itself_waits_until_the_step_is_over(device, standin, marks):
    world = World(device)
    standin.hold(world.model)
    world.write(marks=marks)
    over = torch.npu.Event()
    with torch.npu.stream(world.model):
        over.record()
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: (world.order.bind_thread(), world.order.wait(), seen.append(over.query())))
    thread.start()
    if not marks:
        thread.join(20)
    standin.let_go()
    thread.join(20)
    torch.npu.synchronize()
    assert seen == [marks]


def test_a_mark_does_not_make_the_steps_thread_wait(device, standin):
    world = World(device)
    standin.hold(world.model)
    with standin.counting() as counted:
        world.write(marks=True)
        standin.let_go()
    assert counted["host_syncs"] == 0
    assert counted["event_records"] == 1


def test_staging_begins_on_a_2_mib_boundary_and_a_thread_keeps_its_stream(device):
    world = World(device)
    assert world.memory.address % (2 << 20) == 0
    streams = []
    for _ in range(2):
        with world.order.own_stream():
            streams.append(torch.npu.current_stream().npu_stream)
    assert streams[0] == streams[1] != torch.npu.default_stream().npu_stream
