# SPDX-License-Identifier: Apache-2.0
"""The parts that move bytes: copies, frames, descriptors; and the pure planning of runs."""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.datadist.host import copying, framing
from vllm_ascend_pd.datadist.host.channel import send_message
from vllm_ascend_pd.datadist.host.copying import CopyDeadline, copy_runs
from vllm_ascend_pd.datadist.host.descriptors import receive_arenas, send_arenas
from vllm_ascend_pd.datadist.host.framing import BadFrame, ChannelError, ChannelTimeout, PeerGone
from vllm_ascend_pd.datadist.host.messages import Arenas
from vllm_ascend_pd.datadist.host.runs import pair_blocks, split_into_blocks
from vllm_ascend_pd.memory import Arena

MIB = 1 << 20


def soon() -> float:
    return time.monotonic() + 5


@given(st.permutations(range(20)), st.permutations(range(20)), st.integers(1, 20))
def test_runs_move_exactly_the_pairs(src_order, dst_order, count):
    src, dst = src_order[:count], dst_order[:count]
    source, target = bytes(range(20)), bytearray(20)
    src_offsets, dst_offsets, sizes = pair_blocks(src, dst, 1)
    for start, to, size in zip(src_offsets, dst_offsets, sizes, strict=True):
        target[to : to + size] = source[start : start + size]
    expected = bytearray(20)
    for one, other in zip(src, dst, strict=True):
        expected[other] = source[one]
    assert target == expected


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ([], [], ([], [], [])),
        ([1, 2, 3], [4, 5, 6], ([10], [40], [30])),
        ([1, 2, 3], [4, 6, 7], ([10, 20], [40, 60], [10, 20])),
        ([3, 2, 1], [3, 2, 1], ([30, 20, 10], [30, 20, 10], [10, 10, 10])),
        ([1, 1], [2, 3], ([10, 10], [20, 30], [10, 10])),
    ],
)
def test_consecutive_pairs_become_one_run(src, dst, expected):
    assert pair_blocks(src, dst, 10) == expected


def test_last_block_of_a_slot_gets_the_remainder():
    assert split_into_blocks(100, 25, [7, 2, 9], 10) == ([100, 110, 120], [70, 20, 90], [10, 10, 5])
    assert split_into_blocks(100, 25, [7], 10) == ([100], [70], [10])


@pytest.mark.parametrize("works", [True, False], ids=["one-call", "run-by-run"])
def test_copy_runs_moves_every_run(monkeypatch, works):
    if not works:

        def refused(*_):
            ctypes.set_errno(1)  # EPERM: a sandbox
            return -1

        monkeypatch.setattr(copying, "_libc", type("Libc", (), {"process_vm_readv": staticmethod(refused)}))
    monkeypatch.setattr(copying, "_MAX_CALL_BYTES", 4096)
    monkeypatch.setattr(copying, "_MAX_RUNS", 3)
    source, target = ctypes.create_string_buffer(os.urandom(65536)), ctypes.create_string_buffer(65536)
    sizes = [1, 5000, 3, 4, 5, 6, 4096, 10, 9000]
    starts = [sum(sizes[:index]) + index for index in range(len(sizes))]
    src, dst = ctypes.addressof(source), ctypes.addressof(target)
    copy_runs([dst + start for start in starts], [src + start for start in starts], sizes, math.inf)
    expected = bytearray(len(target.raw))
    for start, size in zip(starts, sizes, strict=True):
        expected[start : start + size] = source.raw[start : start + size]
    assert target.raw == bytes(expected)


def test_copy_from_an_address_that_is_not_mapped_is_an_error_not_a_crash():
    target = ctypes.create_string_buffer(8)
    with pytest.raises(OSError, match="Bad address"):
        copy_runs([ctypes.addressof(target)], [4096], [8], math.inf)


def test_copy_stops_at_its_deadline():
    target = ctypes.create_string_buffer(8)
    address = ctypes.addressof(target)
    with pytest.raises(CopyDeadline, match="after 0 of 1 runs"):
        copy_runs([address], [address], [8], 0.0)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_scattered_views_arrive_in_order(pair, monkeypatch):
    monkeypatch.setattr(framing, "_BATCH_VIEWS", 3)
    monkeypatch.setattr(framing, "_BATCH_BYTES", 70_000)
    data = os.urandom(1_000_000)
    cuts = [0, 1, 1, 65_000, 65_010, 400_000, 999_999, 1_000_000]
    target = bytearray(len(data))
    views = [memoryview(target)[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]
    backwards = [memoryview(data)[start : start + 100_000] for start in range(0, 1_000_000, 100_000)]
    sender = threading.Thread(target=framing.send_from, args=(pair[0], backwards, soon()))
    sender.start()
    framing.receive_into(pair[1], views, soon())
    sender.join()
    assert bytes(target) == data


@pytest.mark.parametrize("partly", [b"", b"1234"])
def test_receive_has_a_deadline_and_notices_the_end(pair, partly):
    ours, theirs = pair
    theirs.sendall(partly)
    with pytest.raises(ChannelTimeout):
        framing.receive_into(ours, [memoryview(bytearray(8))], time.monotonic() + 0.05)
    theirs.close()
    with pytest.raises(PeerGone):
        framing.receive_into(ours, [memoryview(bytearray(8))], soon())


def test_send_has_a_deadline_and_notices_the_end(pair):
    ours, theirs = pair
    with pytest.raises(ChannelTimeout):
        framing.send_from(ours, [memoryview(bytes(64 * MIB))], time.monotonic() + 0.05)
    theirs.close()
    with pytest.raises(PeerGone):
        framing.send_from(ours, [memoryview(b"x")], soon())


def test_idle_means_open_and_silent(pair):
    ours, theirs = pair
    assert framing.poll_idle(ours)
    theirs.sendall(b"x")
    assert not framing.poll_idle(ours)
    ours.recv(1)
    assert framing.poll_idle(ours)
    theirs.close()
    assert not framing.poll_idle(ours)


def test_passed_arena_is_read_only_and_shares_memory(pair):
    arena = Arena.create(3 * MIB, "passed")
    send_arenas(pair[0], {4: arena}, soon())
    mapping = receive_arenas(pair[1], soon())[4]
    arena.buffer[-3:] = b"end"
    assert ctypes.string_at(mapping.address + 3 * MIB - 3, 3) == b"end"
    with pytest.raises(OSError, match="Bad address"):
        copy_runs([mapping.address], [arena.address], [8], math.inf)


def test_no_arenas_is_fine(pair):
    send_arenas(pair[0], {}, soon())
    assert receive_arenas(pair[1], soon()) == {}


def _file(num_bytes: int, seals: int) -> int:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, 1033, seals)
    return fd


@pytest.mark.parametrize(
    ("ids", "sizes", "files"),
    [
        ([0], [2 * MIB], [(2 * MIB, 0)]),  # could shrink under us
        ([0], [2 * MIB], [(MIB, 2)]),  # smaller than announced
        ([0], [2 * MIB, 1], [(2 * MIB, 2)]),
        ([0], [0], [(2 * MIB, 2)]),
        ([0, 1], [2 * MIB] * 2, [(2 * MIB, 2)]),  # one missing
        ([0], [2 * MIB], []),
        ([0], [2 * MIB], [(2 * MIB, 2)] * 8),  # more than announced
        (list(range(65)), [2 * MIB] * 65, []),
    ],
)
def test_descriptors_that_are_not_as_announced_are_refused(pair, ids, sizes, files):
    fds = [_file(*file) for file in files]
    before = len(os.listdir("/proc/self/fd"))
    send_message(pair[0], Arenas(arena_ids=ids, num_bytes=sizes), soon())
    socket.send_fds(pair[0], [b"d"], fds)
    with pytest.raises(ChannelError):
        receive_arenas(pair[1], soon())
    if len(ids) <= len(files):  # else they are still in the socket
        assert len(os.listdir("/proc/self/fd")) == before
    for fd in fds:
        os.close(fd)


def test_not_a_descriptor_message(pair):
    framing.send_frame(pair[0], b"\xff", soon())
    with pytest.raises(BadFrame):
        receive_arenas(pair[1], soon())
