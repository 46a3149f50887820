# SPDX-License-Identifier: Apache-2.0
"""What the lease table remembers, and random schedules against a model of it."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from vllm_ascend_pd.transfer import lease as lease_module
from vllm_ascend_pd.transfer.lease import LeaseState, LeaseTable

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


# ------------------------------------------------------------------ memory and counts


def test_finished_leases_are_forgotten_in_the_end_but_their_blocks_are_not(clock):
    table = LeaseTable(lease_s=LEASE_S, clock=clock, max_finished=2)
    leases = [grant(table, str(n)) for n in range(4)]
    for lease in leases:
        release(table, lease)
    assert release(table, leases[0]).state == "unknown"
    assert release(table, leases[3]).held
    assert [ended.transfer_id for ended in table.drain_ended()] == ["0", "1", "2", "3"]


def test_what_is_remembered_is_small(table):
    lease = grant(table, blocks=((1,) * 1000,), payload=object())
    release(table, lease)
    table.drain_ended()
    (remembered,) = table._finished.values()
    assert remembered.payload is None
    assert remembered.block_ids == ()


def test_counts_tell_what_is_now_and_what_was(table, clock):
    release(table, grant(table, "a"))
    table.cancel(grant(table, "b").transfer_id)
    grant(table, "c")
    clock.now += LEASE_S
    table.expire_due()
    grant(table, "d", ((1, 2),), signed=False)
    assert table.counts() == {
        "held": 1,
        "held_blocks": 2,
        "unsigned_blocks": 2,
        "ended": 3,
        "tombstones": 1,
        "granted": 4,
        "denied": 0,
        "released": 1,
        "expired": 1,
        "cancelled": 1,
    }


def test_internal_indices_are_empty_when_nothing_is_held(table, clock):
    for n in range(50):
        lease = grant(table, str(n))
        (release(table, lease), table.cancel(str(n))) if n % 2 else renew(table, lease)
    clock.now += 2 * LEASE_S
    table.expire_due()
    assert (table._held, table._due) == ({}, [])


@pytest.mark.parametrize("lease_s", [0, -1])
def test_a_lease_without_duration_is_refused(lease_s):
    with pytest.raises(ValueError, match="lease_s"):
        LeaseTable(lease_s=lease_s)


@pytest.mark.parametrize("start", LeaseState)
@pytest.mark.parametrize("to", LeaseState)
def test_of_all_pairs_of_states_only_those_out_of_held_are_allowed(table, start, to):
    lease = grant(table)
    if start is not LeaseState.HELD:
        table._advance(lease, start)
    if start is LeaseState.HELD and to is not LeaseState.HELD:
        table._advance(lease, to)
        assert lease.state is to
    else:
        with pytest.raises(AssertionError, match=f"{start.value} -> {to.value}"):
            table._advance(lease, to)
        assert lease.state is start


def test_threads_cannot_make_a_lease_end_twice(clock):
    table = LeaseTable(lease_s=LEASE_S, clock=clock)
    drained: list[str] = []
    verdicts: dict[str, list[bool]] = {}
    for n in range(200):
        lease = grant(table, f"t{n}", num_ranks=2)
        verdicts[lease.lease_id] = []
        barrier = threading.Barrier(4)

        def reader(rank, lease=lease, barrier=barrier):
            barrier.wait()
            verdicts[lease.lease_id].append(release(table, lease, rank, 2).held)

        def canceller(lease=lease, barrier=barrier):
            barrier.wait()
            table.cancel(lease.transfer_id)

        def drainer(barrier=barrier):
            barrier.wait()
            drained.extend(ended.lease_id for ended in table.drain_ended())

        threads = [threading.Thread(target=reader, args=(rank,)) for rank in (0, 1)]
        threads += [threading.Thread(target=canceller), threading.Thread(target=drainer)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    drained.extend(ended.lease_id for ended in table.drain_ended())
    assert sorted(drained) == sorted(verdicts)
    counts = table.counts()
    assert counts["released"] == sum(all(held) for held in verdicts.values())
    assert counts["released"] + counts["cancelled"] == 200


# ------------------------------------------------------------------ random schedules against a model


class Model:
    """What a lease should be, written without the table's cleverness."""

    def __init__(self, lease, now, num_ranks, signed, blocks):
        self.lease = lease
        self.num_ranks = num_ranks
        self.signed = signed
        self.blocks = blocks
        self.deadline = now + LEASE_S
        self.latest = now + 10 * LEASE_S
        self.state = "held"
        self.answers: dict[int, object] = {}
        self.drained = 0

    def settle(self, now):
        if self.state == "held" and now >= self.deadline:
            self.state = "expired"


TRANSFERS = st.sampled_from(["t0", "t1", "t2", "t3"])
RANKS = st.integers(-1, 3)


class LeaseMachine(RuleBasedStateMachine):
    """Any order of grants, questions, cancels, drains and time; forgetting is switched off (it has its own tests)."""

    leases = Bundle("leases")

    @initialize(share=st.integers(0, 12))
    def start(self, share):
        self.clock = Clock()
        self.share = share
        self.table = LeaseTable(lease_s=LEASE_S, clock=self.clock, max_unsigned_blocks=share, tombstone_ttl_s=50)
        self.models: dict[str, Model] = {}
        self.tombstones: dict[str, float] = {}

    @rule(target=leases, transfer_id=TRANSFERS, num_blocks=st.integers(0, 5), signed=st.booleans(), fixed=st.booleans())
    def grant(self, transfer_id, num_blocks, signed, fixed):
        granted = self.table.grant(transfer_id, ((1,) * num_blocks,), 2 if fixed else None, signed, num_blocks)
        used = sum(m.blocks for m in self.models.values() if not m.signed and not m.drained)
        if self.clock.now < self.tombstones.get(transfer_id, 0):
            assert granted.reason == "cancelled"
        elif not signed and used + num_blocks > self.share:
            assert granted.reason == "unsigned_share"
        else:
            lease = granted.lease
            assert lease.lease_id not in self.models
            self.models[lease.lease_id] = Model(lease, self.clock.now, 2 if fixed else None, signed, num_blocks)
            return lease.lease_id
        assert granted.lease is None
        return ""

    def known(self, lease_id, rank, num_ranks):
        model = self.models.get(lease_id)
        if model is None or not 0 <= rank < num_ranks:
            return None
        if model.num_ranks is None:
            model.num_ranks = num_ranks
        return model if model.num_ranks == num_ranks else None

    @rule(lease_id=leases, rank=RANKS, num_ranks=st.sampled_from([2, 2, 2, 1, 3]))
    def renew(self, lease_id, rank, num_ranks):
        transfer_id = self.models[lease_id].lease.transfer_id if lease_id else "t0"
        verdict = self.table.renew(lease_id, transfer_id, rank, num_ranks)
        model = self.known(lease_id, rank, num_ranks)
        if model is None:
            assert (verdict.held, verdict.state) == (False, "unknown")
            return
        model.settle(self.clock.now)
        if model.state != "held":
            assert (verdict.held, verdict.state) == (False, model.state)
        elif rank in model.answers:
            assert (verdict.held, verdict.state) == (False, "released")
        else:
            model.deadline = max(model.deadline, min(self.clock.now + LEASE_S, model.latest))
            assert verdict.held
            assert not model.drained
            assert abs(verdict.remaining_ms - 1000 * (model.deadline - self.clock.now)) <= 1

    @rule(lease_id=leases, rank=RANKS, num_ranks=st.sampled_from([2, 2, 2, 1, 3]))
    def release(self, lease_id, rank, num_ranks):
        transfer_id = self.models[lease_id].lease.transfer_id if lease_id else "t0"
        verdict = self.table.release(lease_id, transfer_id, rank, num_ranks)
        model = self.known(lease_id, rank, num_ranks)
        if model is None:
            assert (verdict.held, verdict.state) == (False, "unknown")
            return
        if rank in model.answers:
            assert verdict == model.answers[rank]
            return
        model.settle(self.clock.now)
        assert (verdict.held, verdict.state) == (model.state == "held", model.state)
        assert not (verdict.held and model.drained)
        model.answers[rank] = verdict
        if model.state == "held" and len(model.answers) == model.num_ranks:
            model.state = "released"

    @rule(lease_id=leases, rank=st.integers(0, 1))
    def question_with_another_transfer_id(self, lease_id, rank):
        assert self.table.renew(lease_id, "other", rank, 2).state == "unknown"
        assert self.table.release(lease_id, "other", rank, 2).state == "unknown"

    @rule(transfer_id=TRANSFERS)
    def cancel(self, transfer_id):
        self.table.cancel(transfer_id)
        self.tombstones[transfer_id] = self.clock.now + 50
        for model in self.models.values():
            if model.lease.transfer_id == transfer_id:
                model.settle(self.clock.now)
                if model.state == "held":
                    model.state = "cancelled"

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.0, 9.999, 10.0, 60.0]))
    def time_goes_by(self, seconds):
        self.clock.now += seconds

    @rule()
    def expire(self):
        deadline = self.table.next_deadline()
        due = [m for m in self.models.values() if m.state == "held" and self.clock.now >= m.deadline]
        if due:
            assert deadline is not None
            assert deadline <= self.clock.now
        assert self.table.expire_due() == len(due)
        for model in due:
            model.state = "expired"

    @rule()
    def drain(self):
        for ended in self.table.drain_ended():
            model = self.models[ended.lease_id]
            model.drained += 1
            assert model.drained == 1, "drained twice: its blocks would be freed twice"
            assert model.state != "held", "drained while held: a reader's blocks would be reused"
            assert ended.state.value == model.state
            assert ended.payload == model.blocks
        for model in self.models.values():
            # Ended, as far as the table can have noticed, means drained by now.
            assert model.drained or model.state == "held"

    @invariant()
    def counts_agree(self):
        counts = self.table.counts()
        by_state = {state: 0 for state in ("held", "released", "expired", "cancelled")}
        for model in self.models.values():
            by_state[model.state] += 1
        assert {state: counts[state] for state in by_state} == by_state
        assert counts["ended"] == sum(1 for m in self.models.values() if m.state != "held" and not m.drained)
        undrained = [m for m in self.models.values() if not m.signed and not m.drained]
        assert counts["unsigned_blocks"] == sum(m.blocks for m in undrained) <= self.share
        assert counts["granted"] == len(self.models)

    def teardown(self):
        """In the end all blocks come back, whatever happened."""
        if not hasattr(self, "table"):
            return
        self.clock.now += 11 * LEASE_S
        self.expire()
        self.drain()
        assert all(model.drained == 1 for model in self.models.values())


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_machine_notices_a_table_that_prolongs_expired_leases(monkeypatch):
    """The properties above can fail: a table without the check at the question breaks them."""
    monkeypatch.setattr(lease_module.LeaseTable, "_expire_if_due", lambda self, lease, now: False)
    with pytest.raises(AssertionError):
        _run_machine()


def test_the_machine_notices_leases_that_are_drained_twice(monkeypatch):
    drain = LeaseTable.drain_ended

    def twice(self):
        ended = drain(self)
        return ended + ended

    monkeypatch.setattr(lease_module.LeaseTable, "drain_ended", twice)
    with pytest.raises(AssertionError, match="twice"):
        _run_machine()


def _run_machine() -> None:
    """A fixed schedule through the same machine, quick and without shrinking."""
    machine = LeaseMachine()
    machine.start(5)
    lease_id = machine.grant("t0", 2, True, True)
    machine.time_goes_by(10.0)
    machine.renew(lease_id, 0, 2)
    machine.release(lease_id, 0, 2)
    machine.drain()
    machine.teardown()
