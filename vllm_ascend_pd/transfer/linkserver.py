# SPDX-License-Identifier: Apache-2.0
"""The prefill rank's side of a link to CANN's data plane: a small control server in its worker's process.

A decode rank asks before it links. First, what is left of an earlier process on the same device goes: CANN's
communication domain has no heartbeat, so its links would stay for ever. Then, by rank table, this side calls `link`
at the same time as the asking side does, one such link at a time. The control thread takes messages, the thread
"pd-link" works; neither is on the step path. Never run on an NPU.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from vllm_ascend_pd.control.server import ControlServer, Handler, Reply
from vllm_ascend_pd.datadist.api import Way
from vllm_ascend_pd.datadist.pair_table import build_pair_table, digest
from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.transfer.linking import LINK_TIMEOUT_MS, POLL_S, TWO_SIDED_LIMIT_S, comm_name
from vllm_ascend_pd.wire import Ack, DeviceAddress, LinkAsk, LinkEnd, LinkState, Refused

logger = logging.getLogger(__name__)

MAX_LINKS: Final = 512  # Source: datadist-api.md §1.3
MAX_ENDED: Final = 256

BUSY: Final = LinkState(state="busy")


@dataclass
class _Entry:
    """One try to link, and what became of it. Written by "pd-link" only, after it was queued; but for "ending"."""

    ask: LinkAsk
    deadline: float
    table: str = ""
    state: str = "preparing"
    detail: str = ""
    comm_id: int = 0

    @property
    def is_over(self) -> bool:
        return self.state in ("failed", "ended")


class LinkServer:
    """Binds at once; `port` goes into the rank's address."""

    def __init__(
        self,
        datadist: Any,
        module: Any,
        way: Way,
        device: DeviceAddress | None,
        secret: Secret,
        endpoint: tuple[str, str, int],
        bind_thread: Callable[[], object] = lambda: None,
    ) -> None:
        """`endpoint`: local socket path, numeric host, port (0: any). `bind_thread` makes a thread the device's."""
        self._datadist = datadist
        self._module = module
        self._way = way
        self._device = device
        self._bind_thread = bind_thread
        self._work: queue.SimpleQueue[_Entry | str | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards what follows, and the entries' states
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._closing = False
        handlers: dict[type[msgspec.Struct], Handler] = {LinkAsk: self._on_ask, LinkEnd: self._on_end}
        path, host, port = endpoint
        self._server = ControlServer(path, f"tcp://{host}:{port or '*'}", secret, handlers)
        self._thread = threading.Thread(target=self._run, name="pd-link", daemon=True)
        self._server.start()
        self._thread.start()
        self.port = self._server.peer_port

    def problems(self) -> list[str]:
        """Threads that have ended without being asked to."""
        dead = [] if self._thread.is_alive() else [f"dead: thread {self._thread.name}"]
        return dead if self._server.alive() else [*dead, "dead: the link control thread"]

    @property
    def num_links(self) -> int:
        """Of decode ranks, as far as this side knows."""
        with self._lock:
            return sum(entry.state in ("linked", "ready") for entry in self._entries.values())

    def close(self) -> None:
        """Stop answering; a link that is being prepared is given up."""
        self._closing = True
        self._server.close()
        self._work.put(None)
        self._thread.join(timeout=10)

    # ---------------------------------------------------------------- control thread

    def _on_ask(self, message: LinkAsk, reply: Reply) -> None:
        with self._lock:
            entry = self._entries.get(message.link_id)
            if entry is not None:
                reply.send(LinkState(state=entry.state, detail=entry.detail))
                return
        answer = self._admit(message)
        reply.send(answer)

    def _admit(self, message: LinkAsk) -> LinkState | Refused:
        refused, table = self._check(message)
        if refused is not None:
            return refused
        limit_s = min(message.deadline_ms / 1000, TWO_SIDED_LIMIT_S)
        entry = _Entry(message, time.monotonic() + limit_s, table)
        with self._lock:
            alive = [other for other in self._entries.values() if not other.is_over and other.state != "ending"]
            if self._way is Way.TWO_SIDED and any(other.state == "preparing" for other in alive):
                return BUSY
            if len(alive) >= MAX_LINKS and not self._make_room(alive):
                text = f"this prefill rank prepares {len(alive)} links, and its NPU takes {MAX_LINKS}"
                return Refused(code="too_many_links", message=text, field="links", ours=str(len(alive)))
            self._entries[message.link_id] = entry
            self._forget_some()
        self._work.put(entry)
        return LinkState(state="preparing")

    def _make_room(self, alive: list[_Entry]) -> bool:
        """Have the oldest link ended. Most likely its decode rank is gone: one that came back on another host, with no
        device address to know it by, has never ended its earlier links. One that lives links again with its next pull.
        """
        oldest = next((entry for entry in alive if entry.state != "preparing"), None)
        if oldest is None:
            return False
        logger.warning("%d links: ending that of cluster %d, the oldest", len(alive), oldest.ask.cluster_id)
        oldest.state = "ending"
        self._work.put(oldest.ask.link_id)
        return True

    def _check(self, message: LinkAsk) -> tuple[Refused | None, str]:
        """Why this cannot be linked, or nothing and the rank table."""
        for field, ours, theirs in (
            ("way", self._way.value, message.way),
            ("peer_cluster_id", str(self._datadist.cluster_id), str(message.peer_cluster_id)),
        ):
            if ours != theirs:
                return _refuse(field, ours, theirs), ""
        if message.cluster_id == self._datadist.cluster_id:
            return _refuse("cluster_id", "this rank's own", str(message.cluster_id)), ""
        if self._way is not Way.TWO_SIDED:
            return None, ""
        if self._device is None or message.device is None:
            return _refuse("device", str(self._device), str(message.device)), ""
        try:
            table = build_pair_table(self._device, message.device)
        except PDError as error:
            return Refused(code="rank_table", message=str(error), field="device"), ""
        if digest(table) != message.table_digest:
            return _refuse("table_digest", digest(table), message.table_digest), ""
        return None, table

    def _on_end(self, message: LinkEnd, reply: Reply) -> None:
        self._work.put(message.link_id)
        reply.send(Ack())

    def _forget_some(self) -> None:
        over = [link_id for link_id, entry in self._entries.items() if entry.is_over]
        for link_id in over[: max(0, len(over) - MAX_ENDED)]:
            del self._entries[link_id]

    # ---------------------------------------------------------------- link thread

    def _run(self) -> None:
        self._bind_thread()
        while (item := self._work.get()) is not None:
            try:
                if isinstance(item, str):
                    entry = self._entries.get(item)
                    if entry is not None:
                        detail = "to make room" if entry.state == "ending" else "the decode side dropped it"
                        self._end(entry, "ended", detail)
                else:
                    self._drop_predecessors(item)
                    self._link(item)
            except Exception as error:  # one peer's link must not end everybody's
                logger.exception("a link could not be made or ended")
                if isinstance(item, _Entry):
                    self._set(item, "failed", f"{type(error).__name__}: {error}")

    def _drop_predecessors(self, entry: _Entry) -> None:
        """A device runs one process: whoever was linked from it before, or under this id, is gone."""
        with self._lock:
            found = [other for other in self._entries.values() if not other.is_over and _replaces(entry.ask, other.ask)]
        for other in found:
            self._end(other, "ended", "a later process on its device linked")

    def _link(self, entry: _Entry) -> None:
        if self._way is not Way.TWO_SIDED:
            self._set(entry, "ready", "")
            return
        ask = entry.ask
        try:
            ranks = {self._datadist.cluster_id: 0, ask.cluster_id: 1}
            entry.comm_id = self._datadist.link(comm_name(ask.link_id), ranks, entry.table)
            while (status := self._datadist.query_register_mem_status(entry.comm_id).name) == "PREPARING":
                if time.monotonic() > entry.deadline or self._closing:
                    break
                time.sleep(POLL_S)
        except self._module.LLMException as error:
            self._end(entry, "failed", str(error))
            return
        if status == "OK":
            self._set(entry, "linked", "")
        else:
            self._end(entry, "failed", f"RegisterMemStatus.{status} at the deadline")

    def _end(self, entry: _Entry, state: str, detail: str) -> None:
        if entry.is_over:
            return
        try:
            if self._way is not Way.TWO_SIDED:
                cluster = self._module.LLMClusterInfo()
                cluster.remote_cluster_id = entry.ask.cluster_id
                self._datadist.unlink_clusters([cluster], LINK_TIMEOUT_MS, True)
            elif entry.comm_id:
                self._datadist.unlink(entry.comm_id)
        except self._module.LLMException as error:
            logger.warning("link %s to cluster %d: %s", entry.ask.link_id, entry.ask.cluster_id, error)
        self._set(entry, state, detail)

    def _set(self, entry: _Entry, state: str, detail: str) -> None:
        with self._lock:
            entry.state, entry.detail = state, detail
        logger.info("link of cluster %d: %s %s", entry.ask.cluster_id, state, detail)


def _replaces(later: LinkAsk, earlier: LinkAsk) -> bool:
    if later.link_id == earlier.link_id:
        return False
    if later.cluster_id == earlier.cluster_id:
        return True
    if later.device is None or earlier.device is None:
        return False
    if later.device.device_ip and earlier.device.device_ip:  # server_id is a host's address: two pods may share one
        return later.device.device_ip == earlier.device.device_ip
    return (later.device.server_id, later.device.physical_id) == (earlier.device.server_id, earlier.device.physical_id)


def _refuse(field: str, ours: str, theirs: str) -> Refused:
    text = f"{field}: this prefill rank has {ours}, the decode rank asks with {theirs}"
    return Refused(code="link_mismatch", message=text, field=field, ours=ours, theirs=theirs)
