# SPDX-License-Identifier: Apache-2.0
"""Keeps the pool of a decode instance true: waits for the first prefill instance at start, then keeps probing.

Runs on the API server's event loop. A probe asks a prefill instance who it is (HTTP) and has our engine core do the
handshake with it (local plane) when its epoch is new to us.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from vllm_ascend_pd.config import DNS_SCHEME, PDConfig
from vllm_ascend_pd.errors import PDRefusedError, PDUnreachableError
from vllm_ascend_pd.front.ask import AskFailed
from vllm_ascend_pd.front.http_messages import PeerFacts
from vllm_ascend_pd.front.pool import Member, MemberState, PrefillPool
from vllm_ascend_pd.front.remote import Core
from vllm_ascend_pd.wire import WIRE_VERSION, ConnectPeer, ConnectResult, Refused

logger = logging.getLogger(__name__)

PROGRESS_S: Final = 5.0
TICK_S: Final = 0.25
RESOLVE_S: Final = 10.0
CONNECT_TIMEOUT_S: Final = 20.0

Resolve = Callable[[str, int], list[str]]


class PeerAsker(Protocol):
    """What of `AskClient` is needed here."""

    async def get_peer(self, url: str) -> PeerFacts:
        """See AskClient."""
        ...


class PoolWatcher:
    """The only writer of the members' health, but for asks that find one dead."""

    def __init__(
        self, config: PDConfig, pool: PrefillPool, asker: PeerAsker, core: Core, resolve: Resolve | None = None
    ) -> None:
        self._config = config
        self._pool = pool
        self._asker = asker
        self._core = core
        self._resolve = resolve or resolve_name
        self._probing: set[str] = set()
        self._resolved_at_s = float("-inf")

    @property
    def is_any_linked(self) -> bool:
        """Whether some prefill instance may be asked now."""
        return self._pool.num_healthy > 0

    async def wait_for_first(self) -> None:
        """Return when a prefill instance is linked; at once when none is configured.

        Raises:
            PDRefusedError: one answers but does not match us.
            PDUnreachableError: none has answered within `--pd-start-timeout`.
        """
        if not self._config.prefill_urls:
            logger.info("pd decode: no --pd-prefill; requests bring their handoff in kv_transfer_params")
            return
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._config.start_timeout_s
        next_log_s = loop.time() + PROGRESS_S
        while True:
            await self.probe_due()
            for member in self._pool.members:
                if member.state is MemberState.REFUSED:
                    raise PDRefusedError(member.detail)
            if self._pool.num_healthy:
                return
            now_s = loop.time()
            if now_s >= end_s:
                raise PDUnreachableError(
                    f"no prefill instance answered within {self._config.start_timeout_s:g} s (--pd-start-timeout): "
                    f"{self._silent()}"
                )
            if now_s >= next_log_s:
                next_log_s += PROGRESS_S
                logger.info("pd decode: waiting for a prefill instance, %.0f s left: %s", end_s - now_s, self._silent())
            await asyncio.sleep(min(TICK_S, end_s - now_s))

    async def run(self) -> None:
        """Probe for ever; cancel to stop."""
        while True:
            try:
                await self.probe_due()
            except Exception:
                logger.exception("probing the prefill instances failed")
            await asyncio.sleep(TICK_S)

    async def probe_due(self) -> None:
        """Probe all members whose time has come, at the same time."""
        await self._follow_names()
        due = [member for member in self._pool.get_due() if member.url not in self._probing]
        await asyncio.gather(*(self._probe(member) for member in due))

    async def _probe(self, member: Member) -> None:
        self._probing.add(member.url)
        was = member.state
        try:
            facts = await self._asker.get_peer(member.url)
            if facts.draining and not _misfit(facts):
                self._pool.mark_draining(member)
                if was is not MemberState.DRAINING:
                    logger.info("pd decode: %s is being drained; new requests go elsewhere", member.url)
                return
            if was is MemberState.HEALTHY and facts.epoch == member.epoch:
                self._pool.mark_healthy(member, facts.engine_id, facts.epoch)
                return
            refused = _misfit(facts) or await self._connect(facts)
        except (AskFailed, PDUnreachableError) as error:
            self._pool.mark_dead(member, str(error))
            if was is MemberState.HEALTHY:
                logger.warning("pd decode: prefill instance lost: %s", error)
            return
        finally:
            self._probing.discard(member.url)
        if refused:
            self._pool.mark_refused(member, f"{member.url}: {refused}")
            if was is not MemberState.REFUSED:
                logger.error("pd decode: prefill instance %s", member.detail)
            return
        self._pool.mark_healthy(member, facts.engine_id, facts.epoch)
        logger.info("pd decode: linked with %s (engine_id=%s epoch=%s)", member.url, facts.engine_id, facts.epoch)

    async def _connect(self, facts: PeerFacts) -> str:
        """The handshake, by our engine core. Returns the refusal, empty when linked.

        Raises:
            PDUnreachableError: the engine core or the peer's control address does not answer.
        """
        answer = await self._core.request(ConnectPeer(host=facts.host, port=facts.port), CONNECT_TIMEOUT_S)
        if isinstance(answer, ConnectResult):
            if answer.outcome == "linked":
                return ""
            if answer.refused is not None:
                return describe(answer.refused)
            raise PDUnreachableError(
                f"control address {facts.host}:{facts.port} does not answer our engine core: {answer.detail}"
            )
        if isinstance(answer, Refused):
            return describe(answer)
        raise PDUnreachableError(f"the engine core answered {type(answer).__name__} to connect_peer")

    async def _follow_names(self) -> None:
        loop = asyncio.get_running_loop()
        names = [url for url in self._config.prefill_urls if url.startswith(DNS_SCHEME)]
        if not names or loop.time() - self._resolved_at_s < RESOLVE_S and self._pool.members:
            return
        urls = list(self._config.static_prefill_urls)
        for name in names:
            parts = urlsplit(name)
            try:
                addresses = await asyncio.to_thread(self._resolve, parts.hostname or "", parts.port or 80)
            except OSError as error:
                logger.warning("pd decode: %s does not resolve: %s", name, error)
                return  # keep whom we have
            urls += [f"http://{address}{parts.path}" for address in addresses]
        self._resolved_at_s = loop.time()
        self._pool.set_urls(urls)

    def _silent(self) -> str:
        members = [f"{member.url} ({member.detail or 'not asked yet'})" for member in self._pool.members]
        names = [f"{url} (resolves to nothing)" for url in self._config.prefill_urls if url.startswith(DNS_SCHEME)]
        return (
            "; ".join(members or names)
            + ". Check that it runs with --pd-role prefill, the address in --pd-prefill, and the firewall"
        )


def describe(refused: Refused) -> str:
    """A refusal by the prefill side, from the decode side's point of view."""
    if not refused.field:
        return f"refused the handshake: {refused.message or refused.code}"
    return f"refused the handshake: {refused.field} is {refused.ours} there and {refused.theirs} here"


def resolve_name(host: str, port: int) -> list[str]:
    """`address:port` for every address of a name, sorted. Blocks.

    Raises:
        OSError: the name does not resolve.
    """
    found: list[tuple[Any, ...]] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = sorted({str(info[4][0]) for info in found})
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


def _misfit(facts: PeerFacts) -> str:
    if facts.role != "prefill":
        return f"--pd-role there is {facts.role}, not prefill"
    if facts.wire_version != WIRE_VERSION:
        return f"wire_version is {facts.wire_version} there and {WIRE_VERSION} here"
    return ""
