# SPDX-License-Identifier: Apache-2.0
"""The stand-in's controls, by ctypes: counters, slow streams, refusals."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# In the order of tools/npu/standin/standin.h.
COUNTERS = (
    "host_syncs",
    "copies",
    "copies_2d",
    "launches",
    "event_records",
    "event_waits",
    "use_after_free",
    "out_of_bounds",
    "unimplemented",
)
SLOW_US = 30_000
NEVER = 2**64 - 1


class Counted(dict):
    """What happened in a `counting` block, filled at its end."""


class Standin:
    """One process has one."""

    def __init__(self) -> None:
        self._acl = ctypes.CDLL("libascendcl.so")
        self._acl.pd_acl_counter.restype = ctypes.c_long
        self._acl.pd_acl_slow.argtypes = (ctypes.c_void_p, ctypes.c_long)
        self._acl.pd_acl_slow_copies_of.argtypes = (ctypes.c_size_t, ctypes.c_long)
        assert self._acl.pd_acl_num_counters() == len(COUNTERS)
        self._slowed: list[torch.npu.Stream] = []

    def read(self) -> dict[str, int]:
        """All counters."""
        return {name: self._acl.pd_acl_counter(index) for index, name in enumerate(COUNTERS)}

    @contextmanager
    def counting(self) -> Iterator[Counted]:
        """How often each thing happened inside."""
        before, counted = self.read(), Counted()
        yield counted
        counted.update({name: value - before[name] for name, value in self.read().items()})

    def slow(self, stream: torch.npu.Stream) -> None:
        """Every task of this stream starts late."""
        self._slowed.append(stream)
        self._acl.pd_acl_slow(stream.npu_stream, SLOW_US)

    def slow_copies_of(self, num_bytes: int) -> None:
        """The call that posts a copy of this size takes long."""
        self._acl.pd_acl_slow_copies_of(num_bytes, SLOW_US)

    def refuse_2d(self, refuse: bool) -> None:
        """Two-dimensional copies between device addresses are not supported."""
        self._acl.pd_acl_refuse_2d(int(refuse))

    def fail_launches(self, count: int) -> None:
        """The next launches are refused."""
        self._acl.pd_acl_fail_launches(count)

    def reset(self) -> None:
        """No stream is slow, nothing is refused, nothing is under way."""
        for stream in self._slowed:
            self._acl.pd_acl_slow(stream.npu_stream, 0)
        self.slow_copies_of(NEVER)
        self.refuse_2d(False)
        self.fail_launches(0)
        torch.npu.synchronize()


def poll(event, timeout_s: float = 20.0) -> None:
    """Wait for an event without a call that makes the host wait (they are counted)."""
    until = time.monotonic() + timeout_s
    while not event.query():
        assert time.monotonic() < until, "the event never came"
        time.sleep(0.001)
