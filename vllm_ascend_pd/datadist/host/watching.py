# SPDX-License-Identifier: Apache-2.0
"""Links of the C++ plane: opened here, and taken out of the table when their peer has gone.

One thread, `datadist-links`, waits for the plane's events; a close, which may wait for a running transfer, gets a
short-lived thread of its own. What an end means depends on who made the link: a dialler keeps it until it is
unlinked, so that its client sees how it ended.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Final

from vllm_ascend_pd.datadist.host.link import Link, PeerCaches
from vllm_ascend_pd.datadist.host.linktable import LinkTable
from vllm_ascend_pd.native.plane import LinkEvent, LinkEventKind, NativePlane

logger = logging.getLogger(__name__)

_WAIT_S: Final = 3600.0
_WAKE_AGAIN_S: Final = 0.01


class LinkWatcher:
    """Opens links on one plane and acts on their ends."""

    def __init__(self, plane: NativePlane, links: LinkTable, timeout_s: float) -> None:
        self._plane = plane
        self._links = links
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # guards everything below
        self._watched: weakref.WeakValueDictionary[int, Link] = weakref.WeakValueDictionary()
        self._closing: set[threading.Thread] = set()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="datadist-links", daemon=True)
        self._thread.start()

    def open(
        self,
        peer: PeerCaches,
        request_socks: Sequence[socket.socket],
        serve_socks: Sequence[socket.socket],
        last_local_cache_id: int,
        *,
        accepted: bool,
        is_own: bool = False,
    ) -> Link:
        """A link over these connections, which are the plane's from here on. Serving begins at once."""
        request_fds = [sock.detach() for sock in request_socks]
        serve_fds = [sock.detach() for sock in serve_socks]
        with self._lock:  # an event may come before we know its link
            native = self._plane.open_link(request_fds, serve_fds, last_local_cache_id)
            link = Link(peer, native, last_local_cache_id, accepted=accepted, is_own=is_own)
            self._watched[native.link_id] = link
        return link

    def close(self, timeout_s: float) -> None:
        """Stop watching and wait for what is being closed."""
        with self._lock:
            self._stopped = True
        deadline = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._plane.wake()  # again: the thread may not have begun to wait when it was woken before
            self._thread.join(_WAKE_AGAIN_S)
        with self._lock:
            closing = list(self._closing)
        for thread in closing:
            thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            event = self._plane.wait_event(_WAIT_S)
            with self._lock:
                if self._stopped:
                    return
                link = self._watched.get(event.link_id) if event is not None else None
            if event is not None and link is not None:
                try:
                    self._end(link, event)
                except Exception:  # the other links still need this thread
                    logger.exception("cluster_id=%d: the end of a link was not noted", link.cluster_id)
            del link

    def _end(self, link: Link, event: LinkEvent) -> None:
        kind = event.kind
        if kind == LinkEventKind.BROKEN:
            logger.warning("cluster_id=%d: link dropped: %s", link.cluster_id, event.text)
        said_farewell = kind == LinkEventKind.FAREWELL
        if link.accepted and (said_farewell or link.is_own):
            self._links.remove(link)
            self._close(link, self._timeout_s, event.text)
            return
        if link.accepted:
            self._links.retire(link)
        if kind == LinkEventKind.BROKEN:
            self._close(link, 0.0, event.text)

    def _close(self, link: Link, timeout_s: float, reason: str) -> None:
        thread = threading.Thread(target=self._close_now, args=(link, timeout_s, reason), name="datadist-link-end")
        with self._lock:
            self._closing.add(thread)
        thread.start()

    def _close_now(self, link: Link, timeout_s: float, reason: str) -> None:
        started = time.monotonic()
        try:
            link.close(timeout_s, reason)
        finally:
            logger.debug("cluster_id=%d: closed in %.3f s", link.cluster_id, time.monotonic() - started)
            with self._lock:
                self._closing.discard(threading.current_thread())
