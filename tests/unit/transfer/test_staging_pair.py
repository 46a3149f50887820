# SPDX-License-Identifier: Apache-2.0
"""Both sides of staging over real sockets and memory; only the wire between the two staging buffers is a memmove."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from types import SimpleNamespace

import pytest

from vllm_ascend_pd.control.client import ControlClient
from vllm_ascend_pd.datadist.status import LLMException, LLMStatusCode
from vllm_ascend_pd.memory.arena import Arena
from vllm_ascend_pd.plan.blocks import GroupPull
from vllm_ascend_pd.plan.layout import CacheLayout, Region, build_layout
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.transfer.staging import server as server_module
from vllm_ascend_pd.transfer.staging.buffer import SlotTable, StagingBuffer
from vllm_ascend_pd.transfer.staging.chunks import GRANULE_BYTES, SLOT_BYTES, cut
from vllm_ascend_pd.transfer.staging.copier import HostCopier, StagingError
from vllm_ascend_pd.transfer.staging.puller import StagedPuller
from vllm_ascend_pd.transfer.staging.server import StageServer
from vllm_ascend_pd.wire import LeaseVerdict, Refused, StageExtract, StageFree, StageItem, StageSlot

SECRET = Secret(b"s" * 32)
SHAPES = (256 << 10, 256 << 10, 256 << 10, 48 << 10, 48 << 10)
NUM_BLOCKS = 40
PREFILL_SLOTS = 2
ONE_BLOCK = (StageItem(0, 0, 1, (1,)),)


class Side:
    """One engine's caches: every byte of a block tells where it belongs."""

    def __init__(self, fill: int) -> None:
        self.arena = Arena.create(sum(SHAPES) * NUM_BLOCKS, "test")
        regions, address = {}, self.arena.address
        for index, block_bytes in enumerate(SHAPES):
            regions[f"l{index}"] = Region(address, NUM_BLOCKS, block_bytes)
            address += NUM_BLOCKS * block_bytes
        self.layout: CacheLayout = build_layout({name: (region,) for name, region in regions.items()}, [list(regions)])
        self.regions = list(regions.values())
        ctypes.memset(self.arena.address, fill, sum(SHAPES) * NUM_BLOCKS)

    def block(self, tensor: int, block: int) -> bytes:
        region = self.regions[tensor]
        return ctypes.string_at(region.address + block * region.block_bytes, region.block_bytes)

    def write(self, tensor: int, block: int, data: bytes) -> None:
        region = self.regions[tensor]
        ctypes.memmove(region.address + block * region.block_bytes, data, len(data))


def pattern(tensor: int, block: int) -> bytes:
    return random.Random(f"{tensor}/{block}").randbytes(SHAPES[tensor])


class Wire:
    """`pull_blocks` between two staging buffers."""

    def __init__(self, prefill: StagingBuffer, decode: StagingBuffer) -> None:
        self.prefill, self.decode = prefill, decode
        self.calls: list[int] = []
        self.before = lambda: None

    def pull_blocks(self, key, cache, src, dst, src_layer_range, dst_layer_range, tensor_num_per_layer) -> None:
        self.before()
        self.calls.append(len(src))
        for a, b in zip(src, dst, strict=True):
            source = self.prefill.address(0) + a * GRANULE_BYTES
            ctypes.memmove(self.decode.address(0) + b * GRANULE_BYTES, source, GRANULE_BYTES)


class World:
    def __init__(self, tmp_path) -> None:
        self.prefill, self.decode = Side(1), Side(2)
        self.buffers = StagingBuffer(PREFILL_SLOTS, 2), StagingBuffer(1, 2)
        self.copier = HostCopier()
        self.server = StageServer(
            self.buffers[0], self.prefill.layout, self.copier, SECRET, (str(tmp_path / "s.sock"), "127.0.0.1", 0)
        )
        self.client = ControlClient(f"tcp://127.0.0.1:{self.server.port}", SECRET)
        self.wire = Wire(*self.buffers)
        module = SimpleNamespace(BlocksCacheKey=lambda cluster, model: (cluster, model), LLMException=LLMException)
        self.puller = StagedPuller(self.buffers[1], self.decode.layout, self.copier, self.wire, module)

    def pull(self, src: tuple[int, ...], dst: tuple[int, ...], timeout_s: float = 20.0):
        names = [f"l{i}" for i in range(len(SHAPES))]
        chunks = cut([GroupPull(0, src, dst)], self.decode.layout, [names])
        return chunks, self.puller.pull(chunks, self.client, 7, time.monotonic() + timeout_s)

    def extract(self, extract_id: str, items=ONE_BLOCK, deadline_ms: int = 5000):
        message = StageExtract(extract_id=extract_id, items=tuple(items), deadline_ms=deadline_ms)
        return self.client.request(message, 20, 1)

    def free(self, extract_id: str):
        return self.client.request(StageFree(extract_id=extract_id), 20, 1)

    def num_held(self) -> int:
        return self.server._slots.num_held()

    def close(self) -> None:
        self.puller.close()
        self.client.close()
        self.server.close()


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.close()


def test_every_block_of_every_tensor_arrives_and_nothing_else_is_touched(world: World):
    """25 MiB: two slots' worth, the second being extracted while the first is pulled."""
    src, dst = tuple(range(1, 31)), tuple(range(32, 2, -1))
    for tensor in range(len(SHAPES)):
        for block in src:
            world.prefill.write(tensor, block, pattern(tensor, block))
    chunks, _ = world.pull(src, dst)
    assert len(chunks) == 2
    assert world.wire.calls == [chunk.num_granules for chunk in chunks]
    for tensor in range(len(SHAPES)):
        for a, b in zip(src, dst, strict=True):
            assert world.decode.block(tensor, b) == pattern(tensor, a), (tensor, a, b)
        for block in set(range(NUM_BLOCKS)) - set(dst):
            assert world.decode.block(tensor, block) == bytes([2]) * SHAPES[tensor], (tensor, block)
    assert world.num_held() == 0


def test_one_block_of_all_tensors_is_one_message_one_pull_and_one_inject(world: World, monkeypatch):
    injected = []
    inject = world.copier.inject
    monkeypatch.setattr(world.copier, "inject", lambda parts, *rest: (injected.append(parts), inject(parts, *rest)))
    world.pull((3,), (4,))
    assert (len(world.wire.calls), len(injected)) == (1, 1)


def test_a_slot_that_was_given_to_another_reader_fails_the_transfer(world: World, monkeypatch):
    """A reader that is too slow: its slot is overdue, and somebody else asks."""
    monkeypatch.setattr(world.server._slots, "_hold_s", 0.0)

    def others() -> None:
        for number in range(PREFILL_SLOTS):
            assert isinstance(world.extract(f"other {number}"), StageSlot)

    world.wire.before = others
    with pytest.raises(StagingError, match="another reader"):
        world.pull((3,), (4,))
    assert world.decode.block(0, 4) == bytes([2]) * SHAPES[0], "bytes that may be another reader's were not injected"


def test_an_extract_waits_for_a_slot_and_is_refused_after_its_deadline(world: World):
    held = [world.extract(f"e{i}") for i in range(PREFILL_SLOTS)]
    assert len({slot.first for slot in held}) == PREFILL_SLOTS
    refused = world.extract("late", deadline_ms=50)
    assert isinstance(refused, Refused)
    assert refused.code == "staging_busy"
    answers: list = []
    waiting = threading.Thread(target=lambda: answers.append(world.extract("patient")))
    waiting.start()
    assert world.free("e0").held
    waiting.join(10)
    assert answers[0].first == held[0].first


def test_the_same_extract_asked_again_is_one_slot_and_freed_once(world: World):
    assert world.extract("e") == world.extract("e")
    assert world.num_held() == 1
    assert world.free("e") == world.free("e") == LeaseVerdict(held=True, state="released")
    assert world.num_held() == 0
    assert not world.free("never asked").held


@pytest.mark.parametrize(
    "items",
    [
        [StageItem(9, 0, 1, (1,))],
        [StageItem(0, 0, 9, (1,))],
        [StageItem(0, 0, 1, (0,))],
        [StageItem(1, 0, 3, tuple(range(1, NUM_BLOCKS))), StageItem(1, 0, 3, tuple(range(1, NUM_BLOCKS)))],
    ],
    ids=["cache", "tensor", "null block", "more than a slot"],
)
def test_what_cannot_be_extracted_is_refused_and_the_next_one_served(world: World, items):
    answer = world.extract("bad", items)
    assert isinstance(answer, Refused)
    assert answer.code == "staging_request"
    assert isinstance(world.extract("good"), StageSlot)
    assert world.server.problems() == []


def test_a_transfer_that_fails_gives_the_slot_it_had_asked_for_back(world: World):
    def broken() -> None:
        raise OSError("wire")

    world.wire.before = broken
    with pytest.raises(OSError, match="wire"):
        world.pull(tuple(range(1, 31)), tuple(range(1, 31)))
    world.puller.close()  # waits for what was being asked
    assert world.num_held() == 1, "the one that was being read; its time runs out by itself"


def test_the_probe_measures_a_link_and_leaves_no_slot_behind(world: World):
    model = world.puller.measure(world.client, 7)
    assert model.bytes_per_s > 0
    assert model.copy_bytes_per_s > 0
    assert model.ask_s > 0
    assert world.num_held() == 0


def test_a_slot_that_is_being_filled_is_not_taken_over(monkeypatch):
    table = SlotTable(1, hold_s=0.0)
    slot = table.take("a", time.monotonic())
    assert slot == 0
    assert table.take("b", time.monotonic()) is None
    assert not table.free("a"), "not before it is filled"
    table.filled(slot)
    assert table.take("b", time.monotonic()) == 0
    assert not table.free("a")


def test_threads_that_died_are_problems(world: World):
    world.server._asked.put(None)
    world.server._thread.join(10)
    assert world.server.problems() == ["dead: thread pd-stage"]


def test_slots_hold_what_the_constants_say():
    assert SLOT_BYTES % GRANULE_BYTES == 0
    assert server_module.HOLD_S < server_module.MAX_WAIT_S


# ---------------------------------------------------------------- transfers that ended nobody knows how


def fail_with(code: str):
    def fail() -> None:
        raise LLMException("x", status_code=LLMStatusCode[code])

    return fail


@pytest.mark.parametrize("code", ["LLM_TIMEOUT", "LLM_FAILED"])
def test_a_slot_that_may_still_be_written_is_not_used_before_its_link_is_down(world: World, code: str):
    world.wire.before = fail_with(code)
    with pytest.raises(LLMException):
        world.pull((1,), (2,))
    world.wire.before = lambda: None
    with pytest.raises(StagingError, match="no staging slot got free"):
        world.pull((1,), (2,), timeout_s=0.2)
    assert world.puller.take_withheld(8) == []  # another link that went down frees nothing
    slots = world.puller.take_withheld(7)
    assert len(slots) == 1
    world.puller.put_back(slots)
    world.pull((1,), (2,))
    assert world.puller.take_withheld(7) == []
    world.pull((1,), (2,))  # given back once only: the buffer has one slot
    assert world.buffers[1]._free.qsize() == 1


def test_a_slot_of_a_refused_pull_is_free_at_once(world: World):
    world.wire.before = fail_with("LLM_PARAM_INVALID")
    with pytest.raises(LLMException):
        world.pull((1,), (2,))
    world.wire.before = lambda: None
    world.pull((1,), (2,))
