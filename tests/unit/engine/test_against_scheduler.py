# SPDX-License-Identifier: Apache-2.0
"""The decode half under a scheduler with upstream's asserts: whatever comes in whatever order, no assert is tripped,
no block is freed while a rank may write into it, and in the end nothing is left: no request, no load, no lease."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.unit.engine.fakes import Decode, inline_params, make_handoff, make_request, watched
from tests.unit.engine.test_hooks import Connector, Output023, Output032, bare_half, meta
from vllm_ascend_pd.engine import hooks
from vllm_ascend_pd.transfer.loads import RankResult
from vllm_ascend_pd.transfer.tasks import PullTask

NUM_RANKS = 2


class FakeScheduler:
    """What upstream's scheduler does with requests that wait for remote KV, asserts included."""

    def __init__(self, d: Decode) -> None:
        self.d = d
        self.connector = Connector(bare_half(decode=d.half, stats=d.stats))
        self.requests: dict[str, SimpleNamespace] = {}
        self.finished_recving_kv_req_ids: set[str] = set()
        self.failed_recving_kv_req_ids: set[str] = set()
        self.posted: dict[str, list[RankResult]] = {}  # request -> answers that its ranks have not given yet

    def add(self, request: SimpleNamespace) -> None:
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request
        self._set(request, "WAITING")
        self.d.half.new_request(request)

    def _set(self, request: SimpleNamespace, name: str) -> None:
        request.status = SimpleNamespace(name=name)
        request.is_finished = lambda: name.startswith("FINISHED")

    def schedule(self, cached: int) -> None:
        for request in list(self.requests.values()):
            if request.status.name == hooks.WAITING_STATUS and request.request_id in self.finished_recving_kv_req_ids:
                self._promote(request)
            if request.status.name == "WAITING":
                count = self.d.admit(request, cached, ((1, 2, 3),))
                self._set(request, hooks.WAITING_STATUS if count else "RUNNING")
                request.num_computed_tokens = cached + count
        for task in self.d.half.take_tasks():
            assert isinstance(task, PullTask)
            assert not self.posted.get(task.request_id), "two pulls into the same blocks"
            self.posted[task.request_id] = [
                RankResult(task.request_id, task.transfer_id, rank, True, "", 1) for rank in range(NUM_RANKS)
            ]

    def _promote(self, request: SimpleNamespace) -> None:
        if request.request_id in self.failed_recving_kv_req_ids:
            assert request.num_computed_tokens == 0
            self.failed_recving_kv_req_ids.remove(request.request_id)
        self.finished_recving_kv_req_ids.remove(request.request_id)
        self._assert_quiet(request.request_id)
        self._set(request, "WAITING" if request.num_computed_tokens == 0 else "RUNNING")

    def update(self, results: list[RankResult]) -> None:
        output = self.output(kv_connector_worker_meta=meta(*results)) if results else None
        output = hooks.merge_step_output(self, output)
        if output is None:
            return
        for request_id in getattr(output, "failed_recving", ()):
            request = self.requests.get(request_id)
            if request is not None and request.status.name == hooks.WAITING_STATUS:
                request.num_computed_tokens = 0
                self.failed_recving_kv_req_ids.add(request_id)
        for request_id in output.finished_recving or ():
            assert request_id in self.requests
            request = self.requests[request_id]
            if request.status.name == hooks.WAITING_STATUS:
                assert request_id not in self.finished_recving_kv_req_ids, "named twice"
                self.finished_recving_kv_req_ids.add(request_id)
            else:
                assert request.is_finished()
                self._free(request_id)

    def finish(self, request_id: str, status: str) -> None:
        request = self.requests[request_id]
        if request.is_finished():
            return
        delay = False
        if request.status.name == hooks.WAITING_STATUS:
            delay = request_id not in self.finished_recving_kv_req_ids
            self.finished_recving_kv_req_ids.discard(request_id)
            self.failed_recving_kv_req_ids.discard(request_id)
        self._set(request, status)
        self.d.half.request_finished(request_id)
        if not delay:
            self._free(request_id)

    def _free(self, request_id: str) -> None:
        self._assert_quiet(request_id)
        del self.requests[request_id]

    def _assert_quiet(self, request_id: str) -> None:
        assert not self.posted.get(request_id), "its blocks are freed or used while a rank may write into them"


class Machine032(RuleBasedStateMachine):
    """Rules; one engine, three requests at most at a time."""

    output: type = Output032

    def __init__(self) -> None:
        super().__init__()
        self.before = sys.modules.get("vllm.v1.outputs")
        module = ModuleType("vllm.v1.outputs")
        module.KVConnectorOutput = self.output
        sys.modules["vllm.v1.outputs"] = module
        self.d = Decode(num_ranks=NUM_RANKS)
        self.s = FakeScheduler(self.d)
        self.s.output = self.output
        if self.output is Output032:
            self.s._handle_failed_recving = None
        self.count = 0
        self.offered: dict[str, str] = {}  # transfer -> request
        self.pulled: set[str] = set()

    def _next(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    @rule(is_inline=st.booleans(), is_early=st.booleans())
    @precondition(lambda self: len(self.s.requests) < 3)
    def add(self, is_inline: bool, is_early: bool):
        request_id = self._next("r")
        params = watched()
        if is_inline:
            transfer = self._next("t")
            self.offered[transfer] = request_id
            params = inline_params(make_handoff(transfer))
        elif is_early:
            self._deliver(request_id)
        self.s.add(make_request(request_id, params))

    def _deliver(self, request_id: str) -> None:
        transfer = self._next("t")
        self.offered[transfer] = request_id
        self.d.deliver(make_handoff(transfer), request_id)

    def _pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.s.requests)))

    @rule(data=st.data())
    @precondition(lambda self: self.s.requests)
    def deliver(self, data: st.DataObject):
        self._deliver(self._pick(data))

    @rule(data=st.data())
    @precondition(lambda self: self.s.requests and self.offered)
    def deliver_a_used_one(self, data: st.DataObject):
        transfer = data.draw(st.sampled_from(sorted(self.offered)))
        self.d.deliver(make_handoff(transfer), self._pick(data))

    @rule(data=st.data())
    @precondition(lambda self: self.s.requests)
    def compute_locally(self, data: st.DataObject):
        self.d.compute_locally(self._pick(data))

    @rule(data=st.data(), status=st.sampled_from(["FINISHED_ABORTED", "FINISHED_STOPPED"]))
    @precondition(lambda self: self.s.requests)
    def end(self, data: st.DataObject, status: str):
        request_id = self._pick(data)
        if status == "FINISHED_ABORTED" or self.s.requests[request_id].status.name == "RUNNING":
            self.s.finish(request_id, status)

    @rule(cached=st.sampled_from([0, 16, 39]))
    def schedule(self, cached: int):
        self.s.schedule(cached)
        self.pulled |= {result.transfer_id for results in self.s.posted.values() for result in results}

    @rule(data=st.data())
    def update(self, data: st.DataObject):
        open_answers = [(i, r) for i, results in self.s.posted.items() for r in results]
        given = []
        for request_id, result in open_answers:
            if data.draw(st.booleans()):
                self.s.posted[request_id].remove(result)
                given.append(result if data.draw(st.booleans()) else RankResult(
                    request_id, result.transfer_id, result.rank, False, "lease_expired"
                ))  # fmt: skip
        self.s.update(given)

    @rule(seconds=st.sampled_from([1.0, 20.0]))
    def wait(self, seconds: float):
        self.d.now += seconds

    @rule()
    def replaced(self):
        self.d.peers.is_known = not self.d.peers.is_known
        for done in self.d.peers.waiting:
            done(None, "peer: replaced")
        self.d.peers.waiting.clear()

    def teardown(self):
        try:
            for request_id in list(self.s.requests):
                self.s.finish(request_id, "FINISHED_ABORTED")
            for done in self.d.peers.waiting:
                done(None, "peer: replaced")
            answers = [r for results in self.s.posted.values() for r in results]
            self.s.posted.clear()
            self.s.update(answers)
            self.d.now += 100
            self.d.half.drain()
            self.s.update([])
            assert self.s.requests == {}
            assert (self.s.finished_recving_kv_req_ids, self.s.failed_recving_kv_req_ids) == (set(), set())
            half = self.d.half
            assert not any((half._requests, half._early, half._early_local, half._max_tokens_of, half.loads._loads))
            back = {transfer for transfer, _ in self.d.peers.given_back}
            forgotten = self.offered.keys() - back - self.pulled
            # An engine that has been replaced took its leases with it.
            assert not forgotten or "peer" in self.d.stats.totals()["failures"]
        finally:
            if self.before is None:
                sys.modules.pop("vllm.v1.outputs")
            else:
                sys.modules["vllm.v1.outputs"] = self.before


class Machine023(Machine032):
    """The same on 0.23.0."""

    output = Output023


SETTINGS = settings(max_examples=60, stateful_step_count=30, deadline=None)
Machine032.TestCase.settings = SETTINGS
Machine023.TestCase.settings = SETTINGS
TestAgainst032 = Machine032.TestCase
TestAgainst023 = Machine023.TestCase
