# SPDX-License-Identifier: Apache-2.0
"""The library that measures and checks: copies right with every kernel, and finds one wrong byte."""

from __future__ import annotations

import ctypes
import random
import socket
import threading
from array import array

import pytest

from vllm_ascend_pd.bench import native
from vllm_ascend_pd.bench.pool import ALIGNMENT, Pool, count_huge_bytes

MIB = 1 << 20


@pytest.fixture(scope="module")
def pools():
    pair = Pool(2 * MIB), Pool(2 * MIB)
    native.fill(pair[0].address, 2 * MIB, 1)
    return pair


def draw(pools, piece, count, seed=0):
    source = random.Random(seed)
    offsets = [array("Q", [slot * piece for slot in source.sample(range(2 * MIB // piece), count)]) for _ in range(2)]
    return [array("Q", [pool.address + x for x in each]) for pool, each in zip(pools, offsets, strict=True)], offsets


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("piece", [64, 192, 2048, 65536])
def test_every_kernel_copies_all_pieces_and_nothing_else(pools, threads, piece):
    (sources, targets), (origins, _) = draw(pools, piece, 16)
    team = native.Team(threads)
    for kernel in range(len(native.kernel_names())):
        assert team.copy(kernel, piece, targets, sources) > 0
        assert native.find_wrong_byte(targets, origins, piece, 1) is None
        native.poison(targets, piece)
        assert native.find_unpoisoned_byte(pools[1].address, 2 * MIB) is None
    team.close()


def test_one_wrong_byte_anywhere_is_found_at_its_index(pools):
    (sources, targets), (origins, _) = draw(pools, 4096, 8)
    team = native.Team(1)
    for piece, inside in ((0, 0), (3, 1234), (7, 4095)):
        team.copy(0, 4096, targets, sources)
        place = ctypes.c_ubyte.from_address(targets[piece] + inside)
        place.value ^= 1
        assert native.find_wrong_byte(targets, origins, 4096, 1) == piece * 4096 + inside
    native.poison(targets, 4096)
    team.close()


def test_bytes_of_another_place_or_seed_are_wrong(pools):
    origin = array("Q", [4096])
    assert native.find_wrong_byte(array("Q", [pools[0].address + 4096]), origin, 4096, 1) is None
    assert native.find_wrong_byte(array("Q", [pools[0].address + 8192]), origin, 4096, 1) is not None
    assert native.find_wrong_byte(array("Q", [pools[0].address + 4096]), origin, 4096, 2) is not None


def test_a_byte_outside_the_pieces_is_found(pools):
    ctypes.c_ubyte.from_address(pools[1].address + 77).value = 0
    assert native.find_unpoisoned_byte(pools[1].address, 2 * MIB) == 77
    ctypes.c_ubyte.from_address(pools[1].address + 77).value = 0xA5


def test_stream_carries_the_bytes_and_says_when_it_ends_early(pools):
    left, right = socket.socketpair()
    thread = threading.Thread(target=native.send, args=(left.fileno(), pools[0].address, MIB, 10_000))
    thread.start()
    native.receive(right.fileno(), pools[1].address, MIB, 70_000)
    thread.join()
    assert native.find_wrong_byte(array("Q", [pools[1].address]), array("Q", [0]), MIB, 1) is None
    native.poison(array("Q", [pools[1].address]), MIB)
    left.close()
    with pytest.raises(EOFError):
        native.receive(right.fileno(), pools[1].address, 8, 8)
    right.close()


def test_pool_is_aligned_and_its_huge_pages_are_counted():
    pool = Pool(4 * MIB)
    assert pool.address % ALIGNMENT == 0
    assert len(pool.view) == 4 * MIB
    assert 0 <= count_huge_bytes(pool.address) <= 8 * MIB


def test_unknown_kernel_is_an_error(pools):
    team = native.Team(1)
    with pytest.raises(ValueError, match="no copy kernel 99"):
        team.copy(99, 64, array("Q", [pools[1].address]), array("Q", [pools[0].address]))
    team.close()
