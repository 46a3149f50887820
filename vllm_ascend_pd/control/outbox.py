# SPDX-License-Identifier: Apache-2.0
"""Answers on their way from any thread to the control thread, with the wake-up that ends its poll."""

from __future__ import annotations

import socket
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """A queue whose `sleeper` becomes readable after `wake`. Put and wake: any thread; the rest: the owner."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        # Not a zmq socket: those belong to one thread, and any thread may have to wake the owner.
        self.sleeper, self._waker = socket.socketpair()
        self.sleeper.setblocking(False)
        self._waker.setblocking(False)

    def put(self, item: Item) -> None:
        """Queue an item; it is seen at the owner's next round."""
        self._items.append(item)

    def take(self) -> Item | None:
        """The oldest item, or None."""
        return self._items.popleft() if self._items else None

    def wake(self) -> None:
        """Start the owner's next round now."""
        try:
            self._waker.send(b"\0")
        except OSError:
            pass  # full: a wake-up is under way; closed: nobody is left to wake

    def clear_wakes(self) -> None:
        """After a wake-up, before looking for items."""
        try:
            while self.sleeper.recv(4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Later calls of `put` and `wake` do nothing of use and no harm."""
        self.sleeper.close()
        self._waker.close()
