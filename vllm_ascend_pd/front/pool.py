# SPDX-License-Identifier: Apache-2.0
"""Which prefill instance to ask: health, load, prefix affinity.

Pure: no I/O, the clock is injected. Owned by one event loop (that of `front.py`); every API server process
has its own pool, so its loads are those of that process.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import struct
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

AFFINITY_TOKENS: Final = 256  # a shared system prompt is usually longer, a chat turn's head is not
MAX_IMBALANCE_TOKENS: Final = 8192  # how much longer a queue may be for the sake of a warm prefix
FIRST_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 30.0
PROBE_INTERVAL_S: Final = 5.0
GIVE_UP_FAILURES: Final = 2


class MemberState(enum.Enum):
    """Whether a prefill instance may be asked."""

    NEW = "new"  # not answered yet
    HEALTHY = "healthy"  # answered, and our engine core did the handshake with it
    DEAD = "dead"  # did not answer; probed again with back-off
    DRAINING = "draining"  # goes on with what it has, and takes nothing new
    REFUSED = "refused"  # answers, but does not match us; probed at the longest back-off


@dataclasses.dataclass
class Member:
    """One prefill instance as this process sees it."""

    url: str
    state: MemberState = MemberState.NEW
    engine_id: str = ""
    epoch: str = ""
    detail: str = ""  # why it is not healthy
    give_ups: list[Callable[[], object]] = dataclasses.field(default_factory=list)  # one per ask in flight
    num_queued_tokens: int = 0
    num_failures: int = 0
    probe_at_s: float = 0.0

    @property
    def num_in_flight(self) -> int:
        """Asks that wait for this member's answer."""
        return len(self.give_ups)

    def to_status(self) -> dict[str, Any]:
        """For /pd/status."""
        return {
            "url": self.url,
            "state": self.state.value,
            "engine_id": self.engine_id,
            "epoch": self.epoch,
            "in_flight": self.num_in_flight,
            "queued_tokens": self.num_queued_tokens,
            "detail": self.detail,
        }


class PrefillPool:
    """The prefill instances of one decode instance."""

    def __init__(self, urls: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._members = {url: Member(url) for url in urls}

    @property
    def members(self) -> list[Member]:
        """All members, in the order in which they were named."""
        return list(self._members.values())

    @property
    def num_healthy(self) -> int:
        """How many may be asked."""
        return sum(member.state is MemberState.HEALTHY for member in self._members.values())

    def set_urls(self, urls: Collection[str]) -> None:
        """Follow a resolved name: add what is new, drop what is gone and idle."""
        for url in urls:
            self._members.setdefault(url, Member(url))
        for url, member in list(self._members.items()):
            if url not in urls and not member.num_in_flight:
                del self._members[url]

    def choose(self, token_ids: Sequence[int], avoid: Collection[str] = ()) -> Member | None:
        """The member to ask for this prompt, or None when none is healthy.

        The prompt's head picks a favourite (rendezvous hashing, so that a lost member moves only its own
        prompts); the least loaded one wins when the favourite's queue is too long. Those in `avoid` are
        taken only when there is nothing else.
        """
        healthy = [member for member in self._members.values() if member.state is MemberState.HEALTHY]
        candidates = [member for member in healthy if member.url not in avoid] or healthy
        if not candidates:
            return None
        head = struct.pack(f"<{len(token_ids[:AFFINITY_TOKENS])}q", *token_ids[:AFFINITY_TOKENS])
        favourite = max(candidates, key=lambda member: _weight(member.url, head))
        idlest = min(candidates, key=lambda member: (member.num_queued_tokens, member is not favourite))
        if favourite.num_queued_tokens - idlest.num_queued_tokens > MAX_IMBALANCE_TOKENS:
            return idlest
        return favourite

    def start_ask(self, member: Member, num_tokens: int, give_up: Callable[[], object]) -> None:
        """Count an ask that is about to be sent. `give_up` is called when the member turns out to be gone."""
        member.give_ups.append(give_up)
        member.num_queued_tokens += num_tokens

    def end_ask(self, member: Member, num_tokens: int, give_up: Callable[[], object]) -> None:
        """The ask has ended, well or not. Same arguments as for `start_ask`."""
        member.give_ups.remove(give_up)
        member.num_queued_tokens -= num_tokens

    def mark_healthy(self, member: Member, engine_id: str, epoch: str) -> None:
        """It answered and our engine core is linked with this epoch."""
        member.state, member.engine_id, member.epoch = MemberState.HEALTHY, engine_id, epoch
        member.detail, member.num_failures = "", 0
        member.probe_at_s = self._clock() + PROBE_INTERVAL_S

    def mark_dead(self, member: Member, detail: str) -> None:
        """It does not answer: skip it, and probe again after a back-off that doubles.

        A machine that is gone closes no connection, so after a few failures its asks in flight are given up.
        """
        member.state, member.detail = MemberState.DEAD, detail
        backoff_s = min(FIRST_BACKOFF_S * 2**member.num_failures, MAX_BACKOFF_S)
        member.num_failures = min(member.num_failures + 1, 16)
        member.probe_at_s = self._clock() + backoff_s
        if member.num_failures >= GIVE_UP_FAILURES:
            for give_up in list(member.give_ups):
                give_up()

    def mark_draining(self, member: Member) -> None:
        """It takes no new asks; those in flight go on. Probed as often as a healthy one."""
        member.state, member.detail, member.num_failures = MemberState.DRAINING, "is being drained", 0
        member.probe_at_s = self._clock() + PROBE_INTERVAL_S

    def mark_refused(self, member: Member, detail: str) -> None:
        """It does not match us. It may be restarted with other settings, so keep looking."""
        member.state, member.detail = MemberState.REFUSED, detail
        member.probe_at_s = self._clock() + MAX_BACKOFF_S

    def get_due(self) -> list[Member]:
        """Members whose time to be probed has come."""
        now_s = self._clock()
        return [member for member in self._members.values() if member.probe_at_s <= now_s]


def _weight(url: str, head: bytes) -> bytes:
    return hashlib.blake2b(head, digest_size=8, key=hashlib.blake2b(url.encode()).digest()).digest()
