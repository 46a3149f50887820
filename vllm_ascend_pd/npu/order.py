# SPDX-License-Identifier: Apache-2.0
"""Order between an engine's steps and the data plane's threads on one NPU, by events; and a thread's own stream.

The step's thread only records an event (`mark`): it never waits. Threads that move KV bind the device first, work on a
stream of their own, and wait for the last mark: on the device (`wait_on_stream`) or, where somebody outside torch is
about to write, on the host (`wait`).
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any


class NpuOrder:
    """One rank's. `device` as torch names it, with its index: `npu:3`."""

    def __init__(self, device: Any) -> None:
        import torch

        self.device = torch.device(device)
        self._npu: Any = torch.npu
        self._last: Any = None  # written by the step's thread, read by others
        self._own = threading.local()

    def mark(self) -> None:
        """What is on this thread's current stream by now is to be over before KV moves. The step's thread."""
        event = self._npu.Event()
        event.record()
        self._last = event

    def bind_thread(self) -> None:
        """Make the device this thread's: a new thread would work on device 0, and take memory there."""
        self._npu.set_device(self.device)

    def wait(self) -> None:
        """Block this thread until what was marked is over."""
        event = self._last
        if event is not None:
            event.synchronize()

    def wait_on_stream(self) -> None:
        """What is queued next on the current stream waits for what was marked; this thread goes on."""
        event = self._last
        if event is not None:
            event.wait()

    def own_stream(self) -> contextlib.AbstractContextManager[Any]:
        """This thread's stream as the current one. Binds the thread at its first use."""
        stream = getattr(self._own, "stream", None)
        if stream is None:
            self.bind_thread()
            stream = self._own.stream = self._npu.Stream(device=self.device)
        context: contextlib.AbstractContextManager[Any] = self._npu.stream(stream)
        return context


class HostOrder:
    """On a CPU a step is over when it returns, and there is nothing to wait for."""

    def mark(self) -> None:
        """Nothing to mark."""

    def bind_thread(self) -> None:
        """Nothing to bind."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def wait_on_stream(self) -> None:
        """Nothing to wait for."""

    def own_stream(self) -> contextlib.AbstractContextManager[Any]:
        """There are no streams."""
        return contextlib.nullcontext()


Order = NpuOrder | HostOrder


def make_order(device: Any) -> Order:
    """For the device that the caches are on."""
    return NpuOrder(device) if device.type == "npu" else HostOrder()
