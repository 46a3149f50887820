# SPDX-License-Identifier: Apache-2.0
"""The stand-in's controls, by ctypes: counters, held streams, refusals."""

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
    "tasks_posted",
    "tasks_done",
)
SETTLED_S = 0.25
NEVER = 2**64 - 1


class Counted(dict):
    """What happened in a `counting` block, filled at its end."""


class Standin:
    """One process has one."""

    def __init__(self) -> None:
        self._acl = ctypes.CDLL("libascendcl.so")
        self._acl.pd_acl_counter.restype = ctypes.c_long
        self._acl.pd_acl_hold.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._acl.pd_acl_hold_copies_of.argtypes = (ctypes.c_size_t,)
        assert self._acl.pd_acl_num_counters() == len(COUNTERS)
        self._held: list[int] = []

    def read(self) -> dict[str, int]:
        """All counters."""
        return {name: self._acl.pd_acl_counter(index) for index, name in enumerate(COUNTERS)}

    @contextmanager
    def counting(self) -> Iterator[Counted]:
        """How often each thing happened inside."""
        before, counted = self.read(), Counted()
        yield counted
        counted.update({name: value - before[name] for name, value in self.read().items()})

    def hold(self, stream: torch.npu.Stream) -> None:
        """This stream is slow: it starts nothing until `let_go`."""
        self._held.append(stream.npu_stream)  # now: asking for it waits for torch_npu's queue
        self._acl.pd_acl_hold(self._held[-1], 1)

    def hold_copies_of(self, num_bytes: int) -> None:
        """The call that posts a copy of this size does not return until `let_go`."""
        self._acl.pd_acl_hold_copies_of(num_bytes)

    def let_go(self) -> None:
        """Once nothing else can go on: start the held streams, then let held copies be posted."""
        self._settle()
        self._release_streams()
        self._settle()
        self.hold_copies_of(NEVER)

    def _settle(self) -> None:
        """Wait until nothing was posted and no task ended for a while."""
        last, since = None, time.monotonic()
        while time.monotonic() - since < SETTLED_S:
            counted = self.read()
            if (now := (counted["tasks_posted"], counted["tasks_done"])) != last:
                last, since = now, time.monotonic()
            time.sleep(0.005)

    def _release_streams(self) -> None:
        while self._held:
            self._acl.pd_acl_hold(self._held.pop(), 0)

    def refuse_2d(self, refuse: bool) -> None:
        """Two-dimensional copies between device addresses are not supported."""
        self._acl.pd_acl_refuse_2d(int(refuse))

    def fail_launches(self, count: int) -> None:
        """The next launches are refused."""
        self._acl.pd_acl_fail_launches(count)

    def reset(self) -> None:
        """No stream is held, nothing is refused, nothing is under way."""
        self._release_streams()
        self.hold_copies_of(NEVER)
        self.refuse_2d(False)
        self.fail_launches(0)
        torch.npu.synchronize()


def poll(event, timeout_s: float = 20.0) -> None:
    """Wait for an event without a call that makes the host wait (they are counted)."""
    until = time.monotonic() + timeout_s
    while not event.query():
        assert time.monotonic() < until, "the event never came"
        time.sleep(0.001)
