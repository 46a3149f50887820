# SPDX-License-Identifier: Apache-2.0
"""How a decode rank makes and ends one link: by address (`link_clusters`), or together with the prefill rank (`link`).

Runs in the pull threads. Where the data plane is CANN's the prefill rank is asked first (`linkserver.py`): it drops
what is left of an earlier process on our device, and for a two-sided link it calls `link` at the same time as we do.
Never run on an NPU.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from vllm_ascend_pd.control.client import ControlClient
from vllm_ascend_pd.datadist.api import Way
from vllm_ascend_pd.datadist.outcomes import LINK, Action, judge
from vllm_ascend_pd.datadist.pair_table import build_pair_table, digest
from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.transfer.clients import ClientTable
from vllm_ascend_pd.wire import DeviceAddress, LinkAsk, LinkEnd, LinkState, RankAddress

logger = logging.getLogger(__name__)

LINK_TIMEOUT_MS: Final = 5000
TWO_SIDED_LIMIT_S: Final = 30.0  # above what the package itself allows (settings.LINK_TOTAL_S)
WAIT_S: Final = 0.1
POLL_S: Final = 0.02
ASK_TIMEOUT_S: Final = 5.0
ASK_ATTEMPTS: Final = 3
END_TIMEOUT_S: Final = 1.0


class LinkFailedError(PDError):
    """No link to a prefill rank; the message names its address and the status code."""


class Linker(Protocol):
    """Makes and ends links; the caller has one lock per peer."""

    def link(self, peer: RankAddress, deadline: float) -> None:
        """Raises LinkFailedError."""

    def unlink(self, cluster_id: int) -> bool:
        """Whether nothing of the link is left on this side. Unknown ones: True."""


@dataclass(frozen=True)
class Asker:
    """Asks prefill ranks to make ready for a link."""

    clients: ClientTable
    way: Way
    cluster_id: int  # ours
    device: DeviceAddress | None
    pause: Callable[[float], object] = time.sleep

    def ask(self, message: LinkAsk, peer: RankAddress, until: float) -> LinkState:
        """One answer. Raises LinkFailedError."""
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise LinkFailedError(f"{_name(peer)}: the deadline has passed")
        try:
            answer = self._client(peer).request(message, min(left_s, ASK_TIMEOUT_S), ASK_ATTEMPTS)
        except PDError as error:
            raise LinkFailedError(f"{_name(peer)}: {error}") from error
        if not isinstance(answer, LinkState):
            raise LinkFailedError(f"{_name(peer)}: {getattr(answer, 'message', answer)}")
        if answer.state in ("failed", "ending", "ended"):
            raise LinkFailedError(f"{_name(peer)}: its side {answer.state}: {answer.detail}")
        return answer

    def ask_until(self, states: tuple[str, ...], message: LinkAsk, peer: RankAddress, until: float) -> LinkState:
        """Ask again until it is in one of the states. Raises LinkFailedError."""
        while (answer := self.ask(message, peer, until)).state not in states:
            self.pause(POLL_S)
        return answer

    def make_message(self, peer: RankAddress, until: float, table: str = "") -> LinkAsk:
        """The question for one try."""
        return LinkAsk(
            link_id=secrets.token_hex(16),
            way=self.way.value,
            cluster_id=self.cluster_id,
            peer_cluster_id=peer.cluster_id,
            device=self.device,
            table_digest=digest(table) if table else "",
            deadline_ms=max(1, round(1000 * (until - time.monotonic()))),
        )

    def tell_end(self, peer: RankAddress, link_id: str) -> None:
        """The link is gone here; a peer that does not hear it finds out when the next one is made."""
        with suppress(PDError):
            self._client(peer).request(LinkEnd(link_id=link_id), END_TIMEOUT_S, 1)

    def _client(self, peer: RankAddress) -> ControlClient:
        return self.clients.get(peer.host, peer.link_port)


class OneSidedLinker:
    """By address; the prefill side only listens, and is asked first where it wants to be."""

    def __init__(
        self,
        datadist: Any,
        module: Any,
        local_host: str,
        asker: Asker | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._datadist = datadist
        self._module = module
        self._local_host = local_host
        self._asker = asker
        self._pause = pause
        self._asked: dict[int, tuple[RankAddress, str]] = {}  # who is to hear of the end, and of which link

    def link(self, peer: RankAddress, deadline: float) -> None:
        """Raises LinkFailedError."""
        if self._asker is not None and peer.link_port:
            message = self._asker.make_message(peer, deadline)
            self._asker.ask_until(("ready",), message, peer, deadline)
            self._asked[peer.cluster_id] = (peer, message.link_id)
        has_relinked = False
        while True:
            timeout_ms = min(LINK_TIMEOUT_MS, int((deadline - time.monotonic()) * 1000))
            if timeout_ms <= 0:
                raise LinkFailedError(f"{_name(peer)}: the deadline has passed")
            code, text = self._dial(peer, timeout_ms)
            outcome = judge(LINK, code)
            if outcome.action is Action.DONE:
                return
            if outcome.action is Action.WAIT:
                self._pause(WAIT_S)
            elif outcome.action is Action.RELINK and not has_relinked:
                has_relinked = True
                self._unlink_here(peer.cluster_id)
            else:
                if outcome.spoils:
                    self.unlink(peer.cluster_id)
                raise LinkFailedError(f"{_name(peer)}: {text}")

    def _dial(self, peer: RankAddress, timeout_ms: int) -> tuple[Any, str]:
        cluster = self._module.LLMClusterInfo()
        cluster.remote_cluster_id = peer.cluster_id
        cluster.append_local_ip_info(self._local_host, 0)
        cluster.append_remote_ip_info(peer.host, peer.port)
        try:
            overall, codes = self._datadist.link_clusters([cluster], timeout_ms)
        except self._module.LLMException as error:
            return error.status_code, str(error)
        code = codes[0] if codes else overall
        return code, str(code)

    def unlink(self, cluster_id: int) -> bool:
        """By force, which each side does for itself: the other one may be gone. It is told, where it was asked."""
        if not self._unlink_here(cluster_id):
            return False
        peer, link_id = self._asked.pop(cluster_id, (None, ""))
        if peer is not None and self._asker is not None:
            self._asker.tell_end(peer, link_id)
        return True

    def _unlink_here(self, cluster_id: int) -> bool:
        cluster = self._module.LLMClusterInfo()
        cluster.remote_cluster_id = cluster_id
        try:
            code, _ = self._datadist.unlink_clusters([cluster], LINK_TIMEOUT_MS, True)
        except self._module.LLMException as error:
            logger.warning("unlinking %d: %s", cluster_id, error)
            return False
        if code != self._module.LLMStatusCode.LLM_SUCCESS:
            logger.warning("unlinking %d: %s", cluster_id, code)
            return False
        return True


@dataclass(frozen=True)
class _Comm:
    comm_id: int
    link_id: str
    peer: RankAddress


class TwoSidedLinker:
    """By a rank table that both sides build; both call `link`, and both poll.

    A process makes one such link at a time: CANN serialises them anyway, and a rank that waits inside one for a peer
    that waits inside another would wait for ever. A busy prefill rank says so, and we step back before asking again.
    """

    def __init__(self, datadist: Any, module: Any, asker: Asker) -> None:
        self._datadist = datadist
        self._module = module
        self._asker = asker
        self._creating = threading.Lock()
        self._comms: dict[int, _Comm] = {}

    def link(self, peer: RankAddress, deadline: float) -> None:
        """Raises LinkFailedError."""
        device = self._asker.device
        if device is None or peer.device is None:
            side = "decode" if device is None else "prefill"
            raise LinkFailedError(f"{_name(peer)}: the {side} rank's device is not known, and its rank table needs it")
        if not self.unlink(peer.cluster_id):  # what an earlier try left: its memory would never be given back
            raise LinkFailedError(f"{_name(peer)}: what an earlier try began has not ended yet")
        until = min(deadline, time.monotonic() + TWO_SIDED_LIMIT_S)
        try:
            table = build_pair_table(peer.device, device)
        except PDError as error:
            raise LinkFailedError(f"{_name(peer)}: {error}") from error
        while not self._try_once(peer, table, until):
            self._asker.pause(WAIT_S * (0.5 + random.random()))

    def _try_once(self, peer: RankAddress, table: str, until: float) -> bool:
        """False: the prefill rank is making another link."""
        if not self._creating.acquire(timeout=max(0.0, until - time.monotonic())):
            raise LinkFailedError(f"{_name(peer)}: the deadline passed while other links were being made")
        try:
            message = self._asker.make_message(peer, until, table)
            if self._asker.ask(message, peer, until).state == "busy":
                return False
            comm = self._begin(peer, message.link_id, table)
            self._comms[peer.cluster_id] = comm
            try:
                self._wait(comm, until)
                self._asker.ask_until(("linked",), message, peer, until)
            except LinkFailedError:
                self.unlink(peer.cluster_id)
                raise
            return True
        finally:
            self._creating.release()

    def _begin(self, peer: RankAddress, link_id: str, table: str) -> _Comm:
        ranks = {peer.cluster_id: 0, self._asker.cluster_id: 1}
        try:
            return _Comm(self._datadist.link(comm_name(link_id), ranks, table), link_id, peer)
        except self._module.LLMException as error:
            self._asker.tell_end(peer, link_id)
            raise LinkFailedError(f"{_name(peer)}: {error}") from error

    def _wait(self, comm: _Comm, until: float) -> None:
        while True:
            try:
                status = self._datadist.query_register_mem_status(comm.comm_id).name
            except self._module.LLMException as error:
                raise LinkFailedError(f"{_name(comm.peer)}: {error}") from error
            if status == "OK":
                return
            if status == "FAILED":
                raise LinkFailedError(f"{_name(comm.peer)}: memory could not be exchanged (RegisterMemStatus.FAILED)")
            if time.monotonic() > until:
                raise LinkFailedError(f"{_name(comm.peer)}: still being prepared at the deadline")
            self._asker.pause(POLL_S)

    def unlink(self, cluster_id: int) -> bool:
        """Ends the link or its preparation here, and tells the prefill rank."""
        comm = self._comms.get(cluster_id)
        if comm is None:
            return True
        try:
            self._datadist.unlink(comm.comm_id)
        except self._module.LLMException as error:
            if error.status_code.name != "LLM_NOT_YET_LINK":  # unknown there: it is gone
                logger.warning("unlinking %d: %s", cluster_id, error)
                return False
        del self._comms[cluster_id]
        self._asker.tell_end(comm.peer, comm.link_id)
        return True


def make_linker(datadist: Any, module: Any, local_host: str, asker: Asker) -> Linker:
    """What goes into `LinkTable` for the asker's way."""
    if asker.way is Way.TWO_SIDED:
        return TwoSidedLinker(datadist, module, asker)
    return OneSidedLinker(datadist, module, local_host, None if asker.way is Way.HOST else asker)


def comm_name(link_id: str) -> str:
    """The same on both sides, and never used twice."""
    return f"pd_{link_id}"


def _name(peer: RankAddress) -> str:
    return f"link: to {peer.host}:{peer.port or peer.link_port} (rank {peer.tp_rank})"
