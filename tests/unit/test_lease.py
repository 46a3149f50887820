# SPDX-License-Identifier: Apache-2.0
"""Leases: every transition, and random schedules of readers, cancels and time against a plain model."""

from __future__ import annotations

import pytest

from vllm_ascend_pd.transfer.lease import Lease, LeaseState, LeaseTable

LEASE_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def table(clock):
    return LeaseTable(lease_s=LEASE_S, clock=clock, max_unsigned_blocks=10)


def grant(table, transfer_id="t", blocks=((1, 2), (0, 3)), num_ranks=None, signed=True, payload="payload", **kwargs):
    granted = table.grant(transfer_id, blocks, num_ranks, signed, payload, **kwargs)
    assert granted.lease is not None, granted.reason
    return granted.lease


def renew(table, lease, rank=0, num_ranks=1):
    return table.renew(lease.lease_id, lease.transfer_id, rank, num_ranks)


def release(table, lease, rank=0, num_ranks=1):
    return table.release(lease.lease_id, lease.transfer_id, rank, num_ranks)


# ------------------------------------------------------------------ one reader


def test_grant_renew_release_ends_held_and_is_drained_once(table, clock):
    lease = grant(table)
    assert table.drain_ended() == []
    verdict = renew(table, lease)
    assert (verdict.held, verdict.state, verdict.remaining_ms) == (True, "held", 10_000)
    clock.now += 4
    verdict = release(table, lease)
    assert (verdict.held, verdict.state, verdict.remaining_ms) == (True, "held", 6_000)
    assert table.has_ended()
    (ended,) = table.drain_ended()
    assert (ended.lease_id, ended.state, ended.payload) == (lease.lease_id, LeaseState.RELEASED, "payload")
    assert ended.block_ids == ((1, 2), (0, 3))
    assert table.drain_ended() == []
    assert not table.has_ended()


def test_a_repeated_release_gets_the_same_verdict_before_and_after_the_drain(table, clock):
    lease = grant(table)
    first = release(table, lease)
    clock.now += 3
    assert release(table, lease) == first
    table.drain_ended()
    clock.now += 3 * LEASE_S
    table.expire_due()
    assert release(table, lease) == first
    assert table.counts()["released"] == 1


def test_renewing_after_ones_own_release_is_not_held(table):
    lease = grant(table, num_ranks=2)
    release(table, lease, 0, 2)
    assert (renew(table, lease, 0, 2).held, renew(table, lease, 0, 2).state) == (False, "released")
    assert renew(table, lease, 1, 2).held


def test_a_late_renewal_of_a_released_rank_does_not_prolong_the_lease(table, clock):
    lease = grant(table, num_ranks=2)
    release(table, lease, 0, 2)
    clock.now += LEASE_S - 1
    renew(table, lease, 0, 2)
    clock.now += 2
    assert release(table, lease, 1, 2).state == "expired"


# ------------------------------------------------------------------ time


@pytest.mark.parametrize("question", [renew, release])
def test_the_lease_is_over_at_its_deadline_even_before_anybody_expires_it(table, clock, question):
    lease = grant(table)
    clock.now += LEASE_S
    verdict = question(table, lease)
    assert (verdict.held, verdict.state, verdict.remaining_ms) == (False, "expired", 0)
    assert [ended.state for ended in table.drain_ended()] == [LeaseState.EXPIRED]


@pytest.mark.parametrize("question", [renew, release])
def test_an_instant_before_its_deadline_it_is_held(table, clock, question):
    lease = grant(table)
    clock.now += LEASE_S - 0.001
    assert question(table, lease).held


def test_renewal_gives_a_full_term_from_now(table, clock):
    lease = grant(table)
    clock.now += 9
    assert renew(table, lease).remaining_ms == 10_000
    clock.now += 9
    assert table.expire_due() == 0
    assert release(table, lease).held


def test_renewals_end_with_the_longest_life(clock):
    table = LeaseTable(lease_s=10, clock=clock, max_life_s=25)
    lease = grant(table)
    for expected in (10_000, 10_000, 9_000, 1_000):
        assert renew(table, lease).remaining_ms == expected
        clock.now += 8
    assert renew(table, lease).state == "expired"


def test_the_longest_life_is_ten_terms_when_not_given(table, clock):
    lease = grant(table)
    for _ in range(19):
        clock.now += LEASE_S / 2
        assert renew(table, lease).held
    clock.now += LEASE_S / 2
    assert not renew(table, lease).held


def test_expired_never_becomes_held_again(table, clock):
    lease = grant(table)
    clock.now += LEASE_S
    assert table.expire_due() == 1
    assert table.expire_due() == 0
    clock.now -= LEASE_S / 2  # not even when a clock goes wrong
    for question in (renew, release, renew):
        assert (question(table, lease).held, question(table, lease).state) == (False, "expired")


def test_a_rank_that_asks_after_expiry_is_told_and_one_before_keeps_its_verdict(table, clock):
    lease = grant(table, num_ranks=2)
    early = release(table, lease, 0, 2)
    clock.now += LEASE_S
    assert early.held
    assert release(table, lease, 1, 2).state == "expired"
    assert release(table, lease, 0, 2) == early
    assert [ended.state for ended in table.drain_ended()] == [LeaseState.EXPIRED]


def test_next_deadline_is_never_late_and_goes_when_nothing_is_held(table, clock):
    assert table.next_deadline() is None
    first = grant(table, "a")
    clock.now += 2
    second = grant(table, "b")
    assert table.next_deadline() == first.deadline
    renew(table, first)
    assert table.next_deadline() <= second.deadline
    clock.now += 9
    assert table.expire_due() == 0
    clock.now += 1
    assert table.expire_due() == 2
    assert table.next_deadline() is None


# ------------------------------------------------------------------ ranks


def test_the_lease_ends_when_the_last_rank_has_released(table):
    lease = grant(table)
    for rank in (2, 0, 3):
        assert release(table, lease, rank, 4).held
        assert not table.has_ended()
    assert release(table, lease, 0, 4).held  # a repeat does not count twice
    assert not table.has_ended()
    assert release(table, lease, 1, 4).held
    assert table.has_ended()


@pytest.mark.parametrize(("rank", "num_ranks"), [(-1, 2), (2, 2), (0, 3), (0, 1), (5, 2), (0, 0), (0, -1)])
@pytest.mark.parametrize("question", [renew, release])
def test_a_rank_out_of_range_or_another_number_of_ranks_is_unknown_and_changes_nothing(
    table, question, rank, num_ranks
):
    lease = grant(table)
    renew(table, lease, 0, 2)  # the first to ask says how many there are
    verdict = question(table, lease, rank, num_ranks)
    assert (verdict.held, verdict.state) == (False, "unknown")
    assert release(table, lease, 0, 2).held
    assert release(table, lease, 1, 2).held
    assert table.has_ended()


def test_the_number_of_ranks_can_be_fixed_at_the_grant(table):
    lease = grant(table, num_ranks=2)
    assert release(table, lease, 0, 1).state == "unknown"
    assert not table.has_ended()


@pytest.mark.parametrize(("rank", "num_ranks"), [(1, 1), (-1, 1), (0, 0)])
def test_a_senseless_first_question_does_not_fix_the_number_of_ranks(table, rank, num_ranks):
    lease = grant(table)
    assert release(table, lease, rank, num_ranks).state == "unknown"
    assert release(table, lease, 0, 3).held


@pytest.mark.parametrize("question", [renew, release])
def test_an_unknown_lease_or_one_of_another_transfer_is_unknown(table, question):
    lease = grant(table)
    other = Lease(**{**vars(lease), "lease_id": "none"})
    assert question(table, other).state == "unknown"
    other = Lease(**{**vars(lease), "transfer_id": "u"})
    assert question(table, other).state == "unknown"
    assert question(table, lease).held


# ------------------------------------------------------------------ cancel


def test_cancel_ends_the_lease_and_later_questions_are_told(table):
    lease = grant(table)
    assert table.cancel("t") == 1
    assert [ended.state for ended in table.drain_ended()] == [LeaseState.CANCELLED]
    for question in (renew, release):
        assert (question(table, lease).held, question(table, lease).state) == (False, "cancelled")
    assert table.cancel("t") == 0
    assert table.drain_ended() == []


def test_a_cancel_before_the_grant_refuses_the_grant(table):
    assert table.cancel("t") == 0
    refused = table.grant("t", ((1,),), None, True, None)
    assert (refused.lease, refused.reason) == (None, "cancelled")
    assert table.grant("u", ((1,),), None, True, None).lease is not None
    assert table.counts()["denied"] == 1


def test_a_cancel_after_the_release_changes_nothing(table):
    lease = grant(table)
    verdict = release(table, lease)
    table.cancel("t")
    assert release(table, lease) == verdict
    assert [ended.state for ended in table.drain_ended()] == [LeaseState.RELEASED]


def test_a_cancel_after_the_deadline_finds_it_expired(table, clock):
    grant(table)
    clock.now += LEASE_S
    table.cancel("t")
    assert [ended.state for ended in table.drain_ended()] == [LeaseState.EXPIRED]


def test_cancel_ends_all_leases_of_a_transfer_and_no_other(table):
    grant(table)
    grant(table)
    grant(table, "u")
    assert table.cancel("t") == 2
    assert len(table.drain_ended()) == 2
    assert table.counts()["held"] == 1


def test_tombstones_are_forgotten_after_their_time(clock):
    table = LeaseTable(lease_s=LEASE_S, clock=clock, tombstone_ttl_s=60)
    table.cancel("t")
    clock.now += 59.9
    assert table.grant("t", ((1,),), None, True, None).reason == "cancelled"
    clock.now += 0.1
    assert table.grant("t", ((1,),), None, True, None).lease is not None
    table.expire_due()
    assert table.counts()["tombstones"] == 0


def test_tombstones_are_bounded_and_the_oldest_goes_first(clock):
    table = LeaseTable(lease_s=LEASE_S, clock=clock, max_tombstones=3)
    for name in ("a", "b", "a", "c", "d"):
        table.cancel(name)
    assert table.counts()["tombstones"] == 3
    assert table.grant("b", ((1,),), None, True, None).lease is not None
    for name in ("a", "c", "d"):
        assert table.grant(name, ((1,),), None, True, None).reason == "cancelled"


# ------------------------------------------------------------------ unsigned share


def test_unsigned_leases_share_a_bound_and_signed_ones_do_not_count(table):
    grant(table, "a", ((1,) * 6,), signed=False)
    grant(table, "b", ((1,) * 100,), signed=True)
    refused = table.grant("c", ((1,) * 5,), None, False, None)
    assert (refused.lease, refused.reason) == (None, "unsigned_share")
    grant(table, "c", ((1,) * 4,), signed=False)
    assert table.counts()["unsigned_blocks"] == 10


def test_the_unsigned_share_is_free_again_only_when_the_blocks_have_been_taken(table):
    lease = grant(table, "a", ((1,) * 10,), signed=False)
    release(table, lease)
    assert table.grant("b", ((1,),), None, False, None).reason == "unsigned_share"
    table.drain_ended()
    assert table.grant("b", ((1,),), None, False, None).lease is not None


def test_the_null_block_does_not_count_and_a_count_can_be_given(table):
    grant(table, "a", ((0,) * 100 + (1,) * 5,), signed=False)
    assert table.counts()["unsigned_blocks"] == 5
    grant(table, "b", ((1,) * 100,), signed=False, num_blocks=5)
    assert table.grant("c", ((1,),), None, False, None).reason == "unsigned_share"


def test_without_a_share_unsigned_leases_are_refused(clock):
    table = LeaseTable(lease_s=LEASE_S, clock=clock)
    assert table.grant("a", ((1,),), None, False, None).reason == "unsigned_share"
    table.max_unsigned_blocks = 1
    assert table.grant("a", ((1,),), None, False, None).lease is not None
