# SPDX-License-Identifier: Apache-2.0
"""Copies inside one process (datadist-api.md §4.7)."""

from __future__ import annotations

import ctypes

import pytest

from tests.contract.implementation import NAME, Cache, CacheDesc, DataType, MemInfo, Memtype, Placement, status_of

TENSORS, BLOCKS, BLOCK = 3, 8, 64
INT8 = DataType.DT_INT8
INVALID = "LLM_PARAM_INVALID"


class Memory:
    """Three tensors; each block is filled with a byte of its own."""

    def __init__(self, first):
        self.buffers = [(ctypes.c_char * (BLOCKS * BLOCK))() for _ in range(TENSORS)]
        self.addresses = [ctypes.addressof(buffer) for buffer in self.buffers]
        for tensor in range(TENSORS):
            self.write(tensor, bytes(first + tensor * BLOCKS + block for block in range(BLOCKS)))

    def write(self, tensor, values):
        self.buffers[tensor].raw = b"".join(bytes([value]) * BLOCK for value in values)

    def read(self, tensor):
        """The byte of each block; 255 where a block is not of one byte."""
        raw = self.buffers[tensor].raw
        blocks = [set(raw[start : start + BLOCK]) for start in range(0, len(raw), BLOCK)]
        return [values.pop() if len(values) == 1 else 255 for values in blocks]


@pytest.fixture
def memory():
    return Memory(0)


@pytest.fixture
def blocks(manager, memory):
    return manager.register_blocks_cache(CacheDesc(TENSORS, [BLOCKS, BLOCK], INT8), memory.addresses, None, False)


@pytest.fixture
def slots(manager, memory):
    """Four batch slots of two blocks each."""
    return manager.register_cache(CacheDesc(TENSORS, [4, 2 * BLOCK], INT8), memory.addresses, (), False)


@pytest.fixture
def host():
    memory = Memory(100)
    desc = CacheDesc(TENSORS, [BLOCKS, BLOCK], INT8, Placement.HOST)
    cache = Cache.create_cpu_cache(desc, memory.addresses)
    cache.memory = memory
    return cache


def test_copy_cache_copies_a_slot_of_every_tensor(manager, memory, slots):
    manager.copy_cache(slots, slots, 0, 3)
    assert [memory.read(tensor)[:2] for tensor in range(TENSORS)] == [[6, 7], [14, 15], [22, 23]]
    assert memory.read(0)[2:] == [2, 3, 4, 5, 6, 7]


def test_copy_cache_uses_one_offset_on_both_sides(manager, memory, slots):
    manager.copy_cache(slots, slots, 1, 2, BLOCK)  # the rest of the slot
    assert memory.read(1)[2:4] == [10, 13]
    manager.copy_cache(slots, slots, 0, 3, 10, 20, req_id=5)
    assert memory.buffers[0].raw[:BLOCK] == bytes(10) + bytes([6]) * 20 + bytes(BLOCK - 30)


def test_copy_cache_onto_itself_changes_nothing(manager, memory, slots):
    before = memory.buffers[0].raw
    manager.copy_cache(slots, slots, 2, 2)
    assert memory.buffers[0].raw == before


@pytest.mark.parametrize(
    "args",
    [(4, 0), (0, 4), (0, 1, 2 * BLOCK), (0, 1, -1), (0, 1, 1, 2 * BLOCK), (0, 1, 0, 0), (0, 1, 0, -2)],
)
def test_copy_cache_refuses_what_is_out_of_range(manager, slots, args):
    assert status_of(lambda: manager.copy_cache(slots, slots, *args)) == INVALID


def test_copy_cache_needs_slots_and_equal_tensors(manager, memory, slots, blocks):
    few = manager.register_cache(CacheDesc(2, [4, 2 * BLOCK], INT8), memory.addresses[:2], (), False)
    for dst, src in [(slots, blocks), (blocks, slots), (slots, few)]:
        assert status_of(lambda dst=dst, src=src: manager.copy_cache(dst, src)) == INVALID


def test_local_copies_of_unknown_caches_do_not_exist(manager, slots, blocks):
    manager.unregister_cache(slots.cache_id)
    manager.unregister_cache(blocks.cache_id)
    assert status_of(lambda: manager.copy_cache(slots, slots)) == "LLM_KV_CACHE_NOT_EXIST"
    assert status_of(lambda: manager.copy_blocks(blocks, {0: [1]})) == "LLM_KV_CACHE_NOT_EXIST"


@pytest.mark.parametrize(
    ("verb", "args", "error"),
    [
        ("copy_cache", (None, "slots"), TypeError),
        ("copy_cache", ("slots", 5), TypeError),
        ("copy_cache", ("slots", "slots", -1), ValueError),
        ("copy_cache", ("slots", "slots", 0, 2**32), ValueError),
        ("copy_cache", ("slots", "slots", 0, 1, "0"), TypeError),
        ("copy_blocks", (None, {0: [1]}), TypeError),
        ("copy_blocks", ("blocks", [(0, 1)]), TypeError),
        ("copy_blocks", ("blocks", {0: 1}), TypeError),
        ("copy_blocks", ("blocks", {0: [-1]}), TypeError),
        ("copy_blocks", ("blocks", {-1: [0]}), TypeError),
        ("swap_blocks", ("blocks", None, {0: 1}), TypeError),
        ("swap_blocks", ("blocks", "host", [(0, 1)]), TypeError),
        ("swap_blocks", ("blocks", "host", {0: "1"}), TypeError),
        ("swap_blocks", ("blocks", "host", {0: -1}), TypeError),
    ],
)
def test_local_copies_check_their_types(manager, slots, blocks, host, verb, args, error):
    known = {"slots": slots, "blocks": blocks, "host": host}
    values = [known.get(arg, arg) if isinstance(arg, str) else arg for arg in args]
    with pytest.raises(error):
        getattr(manager, verb)(*values)


def test_copy_blocks_copies_to_each_destination_in_every_tensor(manager, memory, blocks):
    manager.copy_blocks(blocks, {5: [6, 7], 0: (1,)})
    assert memory.read(0) == [0, 0, 2, 3, 4, 5, 5, 5]
    assert memory.read(2) == [16, 16, 18, 19, 20, 21, 21, 21]


def test_copy_blocks_keeps_the_callers_order(manager, memory, blocks):
    manager.copy_blocks(blocks, {0: [1], 1: [2], 2: [3], 7: [0]})
    assert memory.read(0) == [7, 0, 0, 0, 4, 5, 6, 7]


@pytest.mark.parametrize("info", [{BLOCKS: [0]}, {0: [BLOCKS]}, {0: [1, BLOCKS]}])
def test_copy_blocks_refuses_what_is_out_of_range(manager, memory, blocks, info):
    assert status_of(lambda: manager.copy_blocks(blocks, info)) == INVALID
    assert memory.read(0) == list(range(BLOCKS))


def test_copy_blocks_needs_a_blocks_cache(manager, slots):
    assert status_of(lambda: manager.copy_blocks(slots, {0: [1]})) == INVALID


def test_swap_blocks_copies_in_either_direction(manager, memory, blocks, host):
    manager.swap_blocks(blocks, host, {1: 2, 2: 3, 7: 0})
    assert host.memory.read(1) == [15, 109, 9, 10, 112, 113, 114, 115]
    assert memory.read(1) == list(range(8, 16))  # copied, not exchanged
    manager.swap_blocks(host, blocks, {4: 0})
    assert memory.read(2) == [120, *range(17, 24)]


@pytest.mark.skipif(NAME != "host", reason="looks into the host implementation")
def test_a_local_copy_is_one_native_call(manager, blocks, slots, host, monkeypatch):
    from vllm_ascend_pd.native.copying import CopyGroup

    calls = []
    monkeypatch.setattr(CopyGroup, "copy", lambda self, src, dst: calls.append((self.num_tensors, len(src))))
    manager.copy_blocks(blocks, {5: [6, 7], 0: [1]})
    manager.swap_blocks(blocks, host, {0: 1, 1: 2, 2: 3})
    manager.copy_cache(slots, slots, 0, 3)
    assert calls == [(TENSORS, 3), (TENSORS, 3), (TENSORS, 1)]


def test_swap_blocks_works_on_addresses_only(manager, memory, blocks, host):
    manager.unregister_cache(blocks.cache_id)
    manager.swap_blocks(host, blocks, {4: 0})
    assert memory.read(0)[0] == 104


def test_swap_blocks_refuses_operands_that_do_not_fit(manager, memory, blocks, slots, host):
    def make_cpu(*shape, tensors=TENSORS):
        return Cache.create_cpu_cache(CacheDesc(tensors, list(shape), INT8, Placement.HOST), [1] * tensors)

    cases = [
        (blocks, blocks, {0: 1}),  # no host side
        (host, host, {0: 1}),  # two
        (slots, host, {0: 1}),
        (blocks, make_cpu(BLOCKS, BLOCK // 2), {0: 1}),
        (blocks, make_cpu(BLOCKS, BLOCK, tensors=2), {0: 1}),
        (blocks, host, {BLOCKS: 0}),
        (blocks, host, {0: BLOCKS}),
    ]
    for src, dst, pairs in cases:
        assert status_of(lambda args=(src, dst, pairs): manager.swap_blocks(*args)) == INVALID


def test_a_cpu_cache_is_host_memory_of_its_descriptor(host):
    assert (host.cache_id, host.is_blocks_cache) == (-1, True)
    device = CacheDesc(1, [4], INT8)
    assert status_of(lambda: Cache.create_cpu_cache(device, [1])) == INVALID
    assert status_of(lambda: Cache.create_cpu_cache(host.cache_desc, [1])) == INVALID
    with pytest.raises(TypeError):
        Cache.create_cpu_cache(host.cache_desc, (1, 2, 3))


DEVICE = Memtype.MEM_TYPE_DEVICE


@pytest.mark.parametrize(
    "infos",
    [[], MemInfo(Memtype.MEM_TYPE_HOST, 1, 1), MemInfo(DEVICE, 0, 1), [MemInfo(DEVICE, 1, 0)], MemInfo(DEVICE, 1, -1)],
)
def test_remap_refuses_what_is_no_device_memory(manager, infos):
    assert status_of(lambda: manager.remap_registered_memory(infos)) == INVALID


@pytest.mark.parametrize("infos", [5, [5], (MemInfo(DEVICE, 1, 1),)])
def test_remap_checks_its_types(manager, infos):
    with pytest.raises(TypeError):
        manager.remap_registered_memory(infos)


def test_remap_needs_a_link(make_node):
    node = make_node(listen=True)
    info = MemInfo(DEVICE, node.addresses[0], 64)
    assert status_of(lambda: node.manager.remap_registered_memory(info)) == "LLM_NOT_YET_LINK"
    node.link(1, node.port)
    assert status_of(lambda: node.manager.remap_registered_memory([info])) == "LLM_SUCCESS"


@pytest.mark.parametrize("args", [("0", 1, 1), (DEVICE, None, 1), (DEVICE, 1, "1")])
def test_mem_info_checks_its_types(args):
    with pytest.raises(TypeError):
        MemInfo(*args)
    info = MemInfo(DEVICE, 3, 4)
    assert (info.mem_type, info.addr, info.size) == (DEVICE, 3, 4)
