# SPDX-License-Identifier: Apache-2.0
"""Leases on a prefill engine's blocks: HELD, then exactly one of RELEASED, EXPIRED, CANCELLED.

The engine thread grants leases and takes ended ones to free their blocks; the control thread answers renew, release and
cancel and expires what is due. One lock guards the whole table; nothing here blocks or touches the block pool.
A one-sided read cannot be stopped, only detected: once a lease has ended, no rank ever hears "held" anew.
"""

from __future__ import annotations

import heapq
import secrets
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from vllm_ascend_pd.wire import LeaseVerdict

MAX_LIFE_TERMS: Final = 10
MAX_FINISHED: Final = 1 << 14
MAX_TOMBSTONES: Final = 1 << 14
TOMBSTONE_TTL_S: Final = 600.0

UNKNOWN: Final = LeaseVerdict(held=False, state="unknown")


class LeaseState(str, Enum):
    """What a lease is. Only HELD has a way out."""

    HELD = "held"  # the blocks are the readers'
    RELEASED = "released"  # every rank has read its last byte
    EXPIRED = "expired"  # time ran out; somebody may still be reading, and will be told
    CANCELLED = "cancelled"  # the decode side gave the request up


_ALLOWED: Final = {
    LeaseState.HELD: frozenset({LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.CANCELLED}),
    LeaseState.RELEASED: frozenset[LeaseState](),
    LeaseState.EXPIRED: frozenset[LeaseState](),
    LeaseState.CANCELLED: frozenset[LeaseState](),
}


@dataclass(eq=False)
class Lease:
    """One grant. Written by the table only, under its lock."""

    lease_id: str
    transfer_id: str
    block_ids: tuple[tuple[int, ...], ...]
    num_blocks: int
    signed: bool
    payload: Any  # the engine's, e.g. the referenced blocks
    granted_at: float
    deadline: float
    latest: float  # no renewal goes beyond this
    state: LeaseState = LeaseState.HELD
    num_ranks: int | None = None  # None until the first reader tells
    reader: str | None = None  # likewise
    verdicts: dict[int, LeaseVerdict] = field(default_factory=dict)  # answers to release, by rank


@dataclass(frozen=True)
class Grant:
    """The outcome of `grant`: a lease, or the reason why there is none (unsigned_share, cancelled)."""

    lease: Lease | None
    reason: str = ""


class LeaseTable:
    """All leases of one engine core. Any thread.

    Args:
        lease_s: one term; a lease ends this long after its grant or last renewal.
        max_unsigned_blocks: what leases that nobody signed for may hold together; may be set later.
        max_life_s: no renewals beyond this age; ten terms when not given.
    """

    def __init__(
        self,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        max_unsigned_blocks: int = 0,
        max_life_s: float | None = None,
        max_finished: int = MAX_FINISHED,
        max_tombstones: int = MAX_TOMBSTONES,
        tombstone_ttl_s: float = TOMBSTONE_TTL_S,
    ) -> None:
        if lease_s <= 0:
            raise ValueError(f"lease_s has to be positive, not {lease_s}")
        self.max_unsigned_blocks = max_unsigned_blocks
        self._lease_s = lease_s
        self._max_life_s = MAX_LIFE_TERMS * lease_s if max_life_s is None else max_life_s
        self._clock = clock
        self._max_finished = max_finished
        self._lock = threading.Lock()
        self._held: dict[str, Lease] = {}
        self._finished: OrderedDict[str, Lease] = OrderedDict()
        self._ended: deque[Lease] = deque()
        self._tombstones = _Tombstones(max_tombstones, tombstone_ttl_s)
        # One entry per lease, pushed at its grant. A renewal only moves the deadline out, so an entry is never late.
        self._due: list[tuple[float, str]] = []
        self._totals: Counter[str] = Counter()

    # ---------------------------------------------------------------- engine thread

    def grant(
        self,
        transfer_id: str,
        block_ids: Sequence[Sequence[int]],
        num_ranks: int | None,
        signed: bool,
        payload: Any,
        num_blocks: int | None = None,
    ) -> Grant:
        """Lease blocks to the readers of one transfer.

        `num_blocks` is what counts against the unsigned share; by default all ids but the null block's.
        """
        ids = tuple(tuple(group) for group in block_ids)
        count = sum(1 for group in ids for block in group if block != 0) if num_blocks is None else num_blocks
        with self._lock:
            now = self._clock()
            reason = self._refusal(transfer_id, signed, count, now)
            if reason:
                self._totals["denied"] += 1
                return Grant(None, reason)
            lease = Lease(
                lease_id=secrets.token_hex(8),
                transfer_id=transfer_id,
                block_ids=ids,
                num_blocks=count,
                signed=signed,
                payload=payload,
                granted_at=now,
                deadline=now + min(self._lease_s, self._max_life_s),
                latest=now + self._max_life_s,
                num_ranks=num_ranks,
            )
            self._held[lease.lease_id] = lease
            heapq.heappush(self._due, (lease.deadline, lease.lease_id))
            self._totals["granted"] += 1
            return Grant(lease)

    def _refusal(self, transfer_id: str, signed: bool, count: int, now: float) -> str:
        if self._tombstones.has(transfer_id, now):
            return "cancelled"
        if not signed and self._unsigned_blocks() + count > self.max_unsigned_blocks:
            return "unsigned_share"
        return ""

    def has_ended(self) -> bool:
        """Whether `drain_ended` has something to give."""
        return bool(self._ended)

    def drain_ended(self) -> list[Lease]:
        """Leases whose blocks may be freed now; each is given exactly once, by the thread that frees."""
        with self._lock:
            ended = list(self._ended)
            self._ended.clear()
            return ended

    # ---------------------------------------------------------------- control thread

    def renew(self, lease_id: str, transfer_id: str, rank: int, num_ranks: int, reader: str = "") -> LeaseVerdict:
        """`rank` is about to read: one more full term, within the lease's longest life."""
        with self._lock:
            now = self._clock()
            lease = self._find(lease_id, transfer_id, rank, num_ranks, reader)
            if lease is None:
                return UNKNOWN
            self._expire_if_due(lease, now)
            if lease.state is not LeaseState.HELD:
                return LeaseVerdict(held=False, state=lease.state.value)
            if rank in lease.verdicts:  # a late repeat from before its release; it must not prolong anything
                return LeaseVerdict(held=False, state=LeaseState.RELEASED.value)
            lease.deadline = min(now + self._lease_s, lease.latest)
            return _held(lease, now)

    def release(self, lease_id: str, transfer_id: str, rank: int, num_ranks: int, reader: str = "") -> LeaseVerdict:
        """`rank` has read its last byte. The first answer to a rank is the answer to all its repeats."""
        with self._lock:
            now = self._clock()
            lease = self._find(lease_id, transfer_id, rank, num_ranks, reader)
            if lease is None:
                return UNKNOWN
            if rank in lease.verdicts:
                return lease.verdicts[rank]
            self._expire_if_due(lease, now)
            if lease.state is not LeaseState.HELD:
                verdict = LeaseVerdict(held=False, state=lease.state.value)
            else:
                verdict = _held(lease, now)
            lease.verdicts[rank] = verdict
            if lease.state is LeaseState.HELD and len(lease.verdicts) == lease.num_ranks:
                self._advance(lease, LeaseState.RELEASED)
            return verdict

    def cancel(self, transfer_id: str) -> int:
        """End all leases of a transfer now and refuse later ones; how many ended."""
        with self._lock:
            now = self._clock()
            self._tombstones.add(transfer_id, now)
            leases = [lease for lease in self._held.values() if lease.transfer_id == transfer_id]
            for lease in leases:
                self._expire_if_due(lease, now)
                if lease.state is LeaseState.HELD:
                    self._advance(lease, LeaseState.CANCELLED)
            return len(leases)

    def expire_due(self) -> int:
        """Expire every lease whose time is over; how many."""
        with self._lock:
            now = self._clock()
            self._tombstones.trim(now)
            num_expired = 0
            while self._due and self._due[0][0] <= now:
                _, lease_id = heapq.heappop(self._due)
                lease = self._held.get(lease_id)
                if lease is None:
                    continue
                if self._expire_if_due(lease, now):
                    num_expired += 1
                else:
                    heapq.heappush(self._due, (lease.deadline, lease_id))
            return num_expired

    def next_deadline(self) -> float | None:
        """A time (of the clock) before which nothing can expire; None when nothing is held."""
        with self._lock:
            while self._due and self._due[0][1] not in self._held:
                heapq.heappop(self._due)
            return self._due[0][0] if self._due else None

    def counts(self) -> dict[str, int]:
        """Now: held, held_blocks, unsigned_blocks, ended (not yet drained), tombstones. In all: the other names."""
        with self._lock:
            return {
                "held": len(self._held),
                "held_blocks": sum(lease.num_blocks for lease in self._held.values()),
                "unsigned_blocks": self._unsigned_blocks(),
                "ended": len(self._ended),
                "tombstones": len(self._tombstones),
                **{name: self._totals[name] for name in ("granted", "denied", "released", "expired", "cancelled")},
            }

    # ---------------------------------------------------------------- under the lock

    def _find(self, lease_id: str, transfer_id: str, rank: int, num_ranks: int, reader: str) -> Lease | None:
        """The lease, held or finished, if the question fits it; notes who reads when it is the first.

        One decode engine reads: what a second one hears from `release` could be the first one's verdict.
        """
        lease = self._held.get(lease_id) or self._finished.get(lease_id)
        if lease is None or lease.transfer_id != transfer_id or not 0 <= rank < num_ranks:
            return None
        if lease.num_ranks is None:
            lease.num_ranks = num_ranks
        if lease.reader is None:
            lease.reader = reader
        return lease if (lease.num_ranks, lease.reader) == (num_ranks, reader) else None

    def _unsigned_blocks(self) -> int:
        """Held, or ended and not yet given back to the pool."""
        return sum(lease.num_blocks for lease in (*self._held.values(), *self._ended) if not lease.signed)

    def _expire_if_due(self, lease: Lease, now: float) -> bool:
        if lease.state is LeaseState.HELD and now >= lease.deadline:
            self._advance(lease, LeaseState.EXPIRED)
            return True
        return False

    def _advance(self, lease: Lease, to: LeaseState) -> None:
        """The only writer of a lease's state."""
        if to not in _ALLOWED[lease.state]:
            raise AssertionError(f"lease {lease.lease_id}: {lease.state.value} -> {to.value}")
        lease.state = to
        self._totals[to.value] += 1
        del self._held[lease.lease_id]
        self._ended.append(lease)
        # Remembered for repeated questions, without what is large. `verdicts` is shared, so answers stay the same.
        self._finished[lease.lease_id] = replace(lease, block_ids=(), payload=None)
        while len(self._finished) > self._max_finished:
            self._finished.popitem(last=False)


class _Tombstones:
    """Transfers that were cancelled, perhaps before their grant: bounded, and forgotten after a while."""

    def __init__(self, limit: int, ttl_s: float) -> None:
        self._limit = limit
        self._ttl_s = ttl_s
        self._until: OrderedDict[str, float] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._until)

    def add(self, transfer_id: str, now: float) -> None:
        self._until[transfer_id] = now + self._ttl_s
        self._until.move_to_end(transfer_id)
        self.trim(now)

    def has(self, transfer_id: str, now: float) -> bool:
        return self._until.get(transfer_id, now) > now

    def trim(self, now: float) -> None:
        while self._until and (len(self._until) > self._limit or next(iter(self._until.values())) <= now):
            self._until.popitem(last=False)


def _held(lease: Lease, now: float) -> LeaseVerdict:
    return LeaseVerdict(held=True, state=LeaseState.HELD.value, remaining_ms=int(1000 * (lease.deadline - now)))
