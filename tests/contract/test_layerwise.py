# SPDX-License-Identifier: Apache-2.0
"""`transfer_cache_async` (datadist-api.md §4.6): two layers of two tensors, to a linked peer."""

from __future__ import annotations

import threading

import pytest

from tests.contract.implementation import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
    status_of,
)
from tests.unit.datadist.datadist_peer import BLOCK_BYTES, NUM_BLOCKS, NUM_TENSORS, TENSOR_BYTES, Node, Peer

INT8 = DataType.DT_INT8
OK = LLMStatusCode.LLM_SUCCESS
INVALID = LLMStatusCode.LLM_PARAM_INVALID
BLOCKS, SLOTS = BlocksCacheKey(2), CacheKeyByIdAndIndex(2, 3, 1)
ALL, FIRST, SECOND = range(0, 2), range(0, 1), range(1, 2)


class Synchronizer(LayerSynchronizer):
    """Records what it is asked, and answers."""

    def __init__(self, answer=lambda layer: True):
        self.asked = []
        self.answer = answer

    def synchronize_layer(self, layer_index, timeout_in_millis):
        self.asked.append((layer_index, timeout_in_millis))
        return self.answer(layer_index)


@pytest.fixture(scope="module", params=["auto", "tcp"])
def linked(request):
    peer = Peer(cluster_id=2, extra_caches=True, transport=request.param)
    node = Node(cluster_id=1, listen=False)
    quarter = TENSOR_BYTES // 4
    node.slots = node.manager.register_cache(CacheDesc(NUM_TENSORS, [4, quarter], INT8), node.addresses)
    node.odd = node.manager.register_blocks_cache(CacheDesc(3, [NUM_BLOCKS, BLOCK_BYTES], INT8), node.addresses[:3])
    assert node.link(2, peer.port) == OK
    node.peer = peer
    yield node
    node.datadist.finalize()
    peer.kill()


def transfer(node, configs, *args, cache=None, synchronizer=None):
    return node.manager.transfer_cache_async(cache or node.cache, synchronizer or Synchronizer(), configs, *args)


def config(key=BLOCKS, src=ALL, dst=ALL, *args):
    return TransferWithCacheKeyConfig(key, src, dst, *args)


def has(node, src, dst):
    """In which of the four tensors the peer's block `dst` holds our block `src`."""
    return node.peer.call("check", 1, src, dst)


def test_every_layer_is_asked_for_in_order_without_a_timeout(linked):
    synchronizer = Synchronizer()
    task = transfer(linked, [config()], [1, 2], (20, 9), synchronizer=synchronizer)
    assert task.synchronize() is OK
    assert task.get_results() == [OK]
    assert synchronizer.asked == [(0, None), (1, None)]
    assert has(linked, 1, 20) == has(linked, 2, 9) == [True] * 4


def test_layers_are_mapped_relative_to_the_start_of_their_ranges(linked):
    synchronizer = Synchronizer()
    task = transfer(linked, [config(src=SECOND, dst=SECOND)], [5], [21], synchronizer=synchronizer)
    assert task.synchronize() is OK
    assert synchronizer.asked == [(1, None)]  # a layer that nobody wants is not asked for
    assert has(linked, 5, 21) == [False, False, True, True]
    assert transfer(linked, [config(src=FIRST, dst=SECOND)], [3], [22]).synchronize() is OK
    node_pulls = {"src_layer_range": SECOND, "dst_layer_range": FIRST}
    linked.pull(2, [22], [40], **node_pulls)
    assert linked.block(0, 40) == linked.block(0, 3)
    linked.fill()


def test_a_slot_goes_to_a_slot(linked):
    assert transfer(linked, [config(SLOTS, ALL, ALL, 2)], cache=linked.slots).synchronize() is OK
    assert has(linked, 32, 16) == has(linked, 47, 31) == [True] * 4  # slot 2 begins at block 32, slot 1 at 16


def test_a_slot_is_cut_into_blocks(linked):
    targets = list(range(63, 47, -1))
    assert transfer(linked, [config()], None, targets, BLOCK_BYTES, cache=linked.slots).synchronize() is OK
    assert has(linked, 0, 63) == has(linked, 15, 48) == [True] * 4


def test_without_block_lists_a_blocks_cache_sends_one_block(linked):
    assert transfer(linked, [config()]).synchronize() is OK
    assert has(linked, 0, 0) == [True] * 4
    assert has(linked, 1, 1) == [False] * 4


def test_a_layer_that_does_not_come_ends_the_job(linked):
    synchronizer = Synchronizer(lambda layer: layer == 0)
    task = transfer(linked, [config(src=SECOND, dst=SECOND)], [1], [24], synchronizer=synchronizer)
    assert task.synchronize() is INVALID
    assert task.get_results() == [INVALID]
    assert has(linked, 1, 24) == [False] * 4


def test_an_exception_of_the_synchronizer_is_a_failure(linked):
    task = transfer(linked, [config()], [1], [25], synchronizer=Synchronizer(lambda layer: 1 // 0))
    assert task.synchronize() is LLMStatusCode.LLM_FAILED


def test_the_first_failing_destination_ends_the_job(linked):
    configs = [config(BlocksCacheKey(77)), config()]
    task = transfer(linked, configs, [1], [26])
    assert task.synchronize() is LLMStatusCode.LLM_NOT_YET_LINK
    assert task.get_results() == [LLMStatusCode.LLM_NOT_YET_LINK, None]
    assert has(linked, 1, 26) == [False] * 4


def test_a_destination_that_has_only_some_layers_is_no_success(linked):
    configs = [config(), config(BlocksCacheKey(77), SECOND, SECOND)]
    task = transfer(linked, configs, [1], [27], synchronizer=Synchronizer(lambda layer: layer == 0))
    assert task.get_results() == [INVALID, INVALID]  # the layer that did not come was both's
    configs = [config(), config(BlocksCacheKey(77), FIRST, FIRST)]
    assert transfer(linked, configs, [1], [27]).get_results() == [
        LLMStatusCode.LLM_FAILED,
        LLMStatusCode.LLM_NOT_YET_LINK,
    ]


def test_two_destinations_in_one_cluster_share_a_result(linked):
    configs = [config(src=FIRST, dst=FIRST), config(src=SECOND, dst=SECOND)]
    assert transfer(linked, configs, [1], [28]).get_results() == [OK]
    assert has(linked, 1, 28) == [True] * 4


@pytest.mark.parametrize(
    ("key", "src", "dst", "status"),
    [
        (BlocksCacheKey(2, 9), [1], [1], "LLM_KV_CACHE_NOT_EXIST"),
        (BlocksCacheKey(2, 1), [1], [1], "LLM_PARAM_INVALID"),  # not accessible
        (BLOCKS, [1], [NUM_BLOCKS], "LLM_PARAM_INVALID"),
        (BLOCKS, [NUM_BLOCKS], [1], "LLM_PARAM_INVALID"),
    ],
)
def test_refusals_of_the_engine_are_results(linked, key, src, dst, status):
    assert transfer(linked, [config(key)], src, dst).synchronize() is LLMStatusCode[status]


def test_destination_layers_outside_the_peers_cache_are_invalid(linked):
    assert transfer(linked, [config(src=FIRST, dst=range(2, 3))], [1], [1]).synchronize() is INVALID


def test_chunks_must_be_the_peers_blocks(linked):
    assert transfer(linked, [config()], None, [1], BLOCK_BYTES * 2, cache=linked.slots).synchronize() is INVALID


def test_waiting_for_a_running_job_times_out(linked):
    gate = threading.Event()
    task = transfer(linked, [config()], [1], [29], synchronizer=Synchronizer(lambda layer: gate.wait(20)))
    assert task.synchronize(10) is LLMStatusCode.LLM_TIMEOUT
    assert task.get_results(0) == [LLMStatusCode.LLM_TIMEOUT]
    gate.set()
    assert task.synchronize() is OK
    with pytest.raises(ValueError, match="uint32"):
        task.synchronize(-1)
    with pytest.raises(TypeError):
        task.get_results("1")


HOST_BLOCKS = Cache(1, CacheDesc(2, [4, 64], INT8, Placement.HOST), [1, 2], True)


@pytest.mark.parametrize(
    ("name", "configs", "args"),
    [
        ("host", [config()], ([1], [1])),
        ("odd", [config()], ([1], [1])),
        ("cache", [], ([1], [1])),
        ("cache", [config()], ([1], None)),  # blocks to a slot
        ("cache", [config()], ([1], [])),
        ("cache", [config()], ([1, 2], [1])),
        ("cache", [config()], (None, [1], 64)),
        ("slots", [config()], ([1], [1])),
        ("slots", [config()], (None, [1])),  # no dst_block_memory_size
        ("slots", [config()], (None, [1], 0)),
        ("slots", [config()], (None, [1], TENSOR_BYTES)),
        ("slots", [config(SLOTS)], (None, None, 64)),  # without blocks
        ("slots", [config(SLOTS)], (None, [1], 64)),
        ("slots", [config()], ()),
        ("cache", [config(SLOTS, ALL, ALL, 1)], ()),
        ("cache", [config(BLOCKS, range(1, 3), ALL)], ([1], [1])),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_a_thread_starts(linked, name, configs, args):
    cache = HOST_BLOCKS if name == "host" else getattr(linked, name)
    before = threading.active_count()
    assert status_of(lambda: transfer(linked, configs, *args, cache=cache)) == "LLM_PARAM_INVALID"
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "args",
    [
        (None, Synchronizer(), [config()]),
        ("cache", None, [config()]),
        ("cache", "x", [config()]),
        ("cache", Synchronizer(), None),
        ("cache", Synchronizer(), config()),
        ("cache", Synchronizer(), [TransferConfig(2, [1] * 4)]),  # of the other mode
        ("cache", Synchronizer(), [config()], "1", [1]),
        ("cache", Synchronizer(), [config()], [1], [-1]),
        ("slots", Synchronizer(), [config()], None, [1], "64"),
    ],
)
def test_arguments_of_wrong_type_are_refused(linked, args):
    cache = getattr(linked, args[0]) if args[0] else None
    with pytest.raises(TypeError):
        linked.manager.transfer_cache_async(cache, *args[1:])


def test_the_synchronizer_is_abstract():
    with pytest.raises(TypeError):
        LayerSynchronizer()


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((CacheKey(1, 2), ALL, ALL), TypeError),
        ((None, ALL, ALL), TypeError),
        ((BLOCKS, None, ALL), TypeError),
        ((BLOCKS, ALL, None), TypeError),
        ((BLOCKS, (0, 1), ALL), TypeError),
        ((SLOTS, ALL, ALL, "0"), TypeError),
        ((SLOTS, ALL, ALL, -1), ValueError),
    ],
)
def test_a_destination_checks_its_types(args, error):
    with pytest.raises(error):
        TransferWithCacheKeyConfig(*args)


@pytest.mark.parametrize(
    "args",
    [
        (BLOCKS, ALL, FIRST),
        (BLOCKS, range(0, 4, 2), ALL),
        (BLOCKS, range(2, 2), range(2, 2)),
        (BLOCKS, range(-1, 1), ALL),
        (BLOCKS, ALL, ALL, 1),
    ],
)
def test_a_destination_refuses_ranges_that_do_not_fit(args):
    assert status_of(lambda: TransferWithCacheKeyConfig(*args)) == "LLM_PARAM_INVALID"


def test_a_destination_knows_its_cluster():
    assert TransferWithCacheKeyConfig(SLOTS, ALL, range(1, 3), 1).dst_cluster_id == 2


@pytest.mark.parametrize(
    ("args", "error"),
    [((-1, [1]), ValueError), ((1, None), TypeError), ((1, ["1"]), TypeError), ((1, [-1]), ValueError)],
)
def test_a_destination_by_addresses_checks_its_types(args, error):
    with pytest.raises(error):
        TransferConfig(*args)
    assert TransferConfig(1, (5,)).dst_layer_range is None
