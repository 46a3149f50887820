# SPDX-License-Identifier: Apache-2.0
"""The links of this process by the peer's cluster id, and which cluster ids are being dialled.

One lock guards the table; closing a link happens outside it, because that waits for its running transfer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from vllm_ascend_pd.datadist.host.link import Link

_MAX_VANISHED: Final = 512  # accepted links whose peer is gone without a word; kept so that a pull says TIMEOUT


class LinkTable:
    """At most one link per peer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards everything below
        self._links: dict[int, Link] = {}
        self._vanished: dict[int, Link] = {}
        self._dialling: set[int] = set()
        self._own: set[Link] = set()  # the accepting end of links to ourselves

    def get(self, cluster_id: int) -> Link | None:
        """The link to that peer, usable or spoiled."""
        with self._changed:
            return self._links.get(cluster_id)

    def add(self, link: Link) -> bool:
        """False when there is one already."""
        with self._changed:
            if link.cluster_id in self._links:
                return False
            self._links[link.cluster_id] = link
            return True

    def add_own(self, link: Link) -> None:
        """The accepting end of a link to ourselves; not found by cluster id."""
        with self._changed:
            self._own.add(link)

    def remove(self, link: Link) -> bool:
        """Forget the link; False when it was not in the table any more."""
        with self._changed:
            self._own.discard(link)
            self._vanished.pop(link.cluster_id, None)
            if self._links.get(link.cluster_id) is not link:
                return False
            del self._links[link.cluster_id]
            return True

    def retire(self, link: Link) -> None:
        """An accepted link whose peer vanished stays until it is replaced; the oldest go when there are many."""
        with self._changed:
            self._own.discard(link)
            if self._links.get(link.cluster_id) is not link:
                return
            self._vanished[link.cluster_id] = link
            while len(self._vanished) > _MAX_VANISHED:
                oldest = next(iter(self._vanished))
                if self._links.get(oldest) is self._vanished.pop(oldest):
                    del self._links[oldest]

    def all(self) -> list[Link]:
        """Every link, also the accepting ends of links to ourselves."""
        with self._changed:
            return [*self._links.values(), *self._own]

    def has_live(self) -> bool:
        """Whether any link is usable."""
        return any(link.is_live for link in self.all())

    @contextmanager
    def dialling(self, cluster_id: int) -> Iterator[None]:
        """One dial per peer at a time; a second waits."""
        with self._changed:
            while cluster_id in self._dialling:
                self._changed.wait()
            self._dialling.add(cluster_id)
        try:
            yield
        finally:
            with self._changed:
                self._dialling.discard(cluster_id)
                self._changed.notify_all()

    def is_dialling(self, cluster_id: int) -> bool:
        """Whether this process is making a link to that peer now."""
        with self._changed:
            return cluster_id in self._dialling
