# SPDX-License-Identifier: Apache-2.0
"""Gather-scatter copies inside this process: many runs in one system call, with the GIL released.

`process_vm_readv` on our own process copies up to 1024 runs per call at the speed of memcpy, and a bad address
is an error instead of a crash. Where a sandbox forbids it, runs are copied one by one. The C++ data plane
will replace this file behind the same function.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import time
from collections.abc import Sequence
from typing import Final

_MAX_RUNS: Final = 1024  # IOV_MAX
_MAX_CALL_BYTES: Final = 32 << 20  # between two looks at the deadline

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


class CopyDeadline(Exception):
    """The deadline passed; part of the bytes may have been written."""


def copy_runs(destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int], deadline: float) -> None:
    """Copy `sizes[i]` bytes from address `sources[i]` to `destinations[i]`; no overlap.

    Raises CopyDeadline, OSError (EFAULT: an address that is not mapped, or a read-only destination).
    """
    start, count = 0, len(sizes)
    while start < count:
        if time.monotonic() >= deadline:
            raise CopyDeadline(f"deadline passed after {start} of {count} runs")
        stop, total = start, 0
        while stop < count and stop - start < _MAX_RUNS and (total == 0 or total + sizes[stop] <= _MAX_CALL_BYTES):
            total += sizes[stop]
            stop += 1
        if total > _MAX_CALL_BYTES:
            _copy_long(destinations[start], sources[start], total, deadline)
        else:
            _copy_batch(destinations[start:stop], sources[start:stop], sizes[start:stop], total)
        start = stop


def _copy_long(destination: int, source: int, size: int, deadline: float) -> None:
    for offset in range(0, size, _MAX_CALL_BYTES):
        if time.monotonic() >= deadline:
            raise CopyDeadline(f"deadline passed after {offset} of {size} bytes of a run")
        piece = min(_MAX_CALL_BYTES, size - offset)
        _copy_batch([destination + offset], [source + offset], [piece], piece)


def _copy_batch(destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int], total: int) -> None:
    count = len(sizes)
    lengths = array.array("Q", sizes)
    local, remote = array.array("Q", bytes(16 * count)), array.array("Q", bytes(16 * count))
    local[0::2], local[1::2] = array.array("Q", destinations), lengths
    remote[0::2], remote[1::2] = array.array("Q", sources), lengths
    moved = _libc.process_vm_readv(os.getpid(), local.buffer_info()[0], count, remote.buffer_info()[0], count, 0)
    if moved == total:
        return
    code = ctypes.get_errno() if moved < 0 else errno.EFAULT
    if code not in (errno.EPERM, errno.ENOSYS):
        raise OSError(code, f"copy of {count} runs failed: {os.strerror(code)}")
    for destination, source, size in zip(destinations, sources, sizes, strict=True):
        ctypes.memmove(destination, source, size)
