# SPDX-License-Identifier: Apache-2.0
"""What a link is made with: frames and descriptors; and the pure planning of blocks."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import threading
import time
from array import array

import pytest

from vllm_ascend_pd.datadist.host import framing
from vllm_ascend_pd.datadist.host.channel import send_message
from vllm_ascend_pd.datadist.host.descriptors import receive_arenas, send_arenas
from vllm_ascend_pd.datadist.host.framing import BadFrame, ChannelError, ChannelTimeout, PeerGone
from vllm_ascend_pd.datadist.host.messages import Arenas
from vllm_ascend_pd.datadist.host.runs import check_blocks, split_into_blocks
from vllm_ascend_pd.datadist.status import LLMException
from vllm_ascend_pd.memory import Arena

MIB = 1 << 20


def soon() -> float:
    return time.monotonic() + 5


def test_a_slot_is_cut_into_blocks_of_which_the_last_gets_the_remainder():
    assert split_into_blocks(25, 3, 10) == (array("q", [0, 1, 2]), 5)
    assert split_into_blocks(30, 3, 10) == (array("q", [0, 1, 2]), 10)
    assert split_into_blocks(100, 1, 10) == (array("q", [0]), 10)
    with pytest.raises(LLMException):
        split_into_blocks(20, 3, 10)


@pytest.mark.parametrize("blocks", [[3, 64], [-1, 5], array("q", [64])])
def test_blocks_outside_are_refused_by_number(blocks):
    with pytest.raises(LLMException, match="block (64|-1) of a cache of 64"):
        check_blocks("source", blocks, 64)
    check_blocks("source", [0, 63], 64)
    check_blocks("source", [], 64)


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


def test_passed_arena_is_read_only_and_shares_memory(pair):
    arena = Arena.create(3 * MIB, "passed")
    send_arenas(pair[0], {4: arena}, soon())
    mapping = receive_arenas(pair[1], soon())[4]
    arena.buffer[-3:] = b"end"
    assert ctypes.string_at(mapping.address + 3 * MIB - 3, 3) == b"end"
    fault = os.pipe()
    os.write(fault[1], b"x")
    with pytest.raises(OSError, match="Bad address"):  # the kernel may not write there either
        os.readv(fault[0], [(ctypes.c_char * 8).from_address(mapping.address)])
    for fd in fault:
        os.close(fd)


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
