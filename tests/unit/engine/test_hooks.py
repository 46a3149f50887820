# SPDX-License-Identifier: Apache-2.0
"""What the edits call: completions that upstream's asserts accept, on both releases, and nothing without a PD role."""

from __future__ import annotations

import queue
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.unit.engine.fakes import Decode
from vllm_ascend_pd.engine import hooks, scheduler
from vllm_ascend_pd.engine.scheduler import SchedulerHalf
from vllm_ascend_pd.transfer.lease import LeaseTable
from vllm_ascend_pd.transfer.loads import RankResult


@dataclass
class Output032:
    """KVConnectorOutput of 0.32.0, as far as it is used."""

    finished_recving: set[str] | None = None
    kv_connector_stats: Any = None
    kv_connector_worker_meta: Any = None
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class Output023:
    """KVConnectorOutput of 0.23.0."""

    finished_recving: set[str] | None = None
    kv_connector_stats: Any = None
    kv_connector_worker_meta: Any = None


def meta(*results: RankResult, problems=None, links=None) -> SimpleNamespace:
    return SimpleNamespace(rank_results=list(results), problems=problems or {}, links=links or {})


def in_multi(part: Any) -> SimpleNamespace:
    return SimpleNamespace(metadata=(None, part, SimpleNamespace(theirs=1)))


class Connector:
    """A DataDistConnector of a decode engine."""

    is_datadist = True

    def __init__(self, half: Any) -> None:
        self.half = half

    def get_kv_connector_stats(self) -> Any:
        return self.half.stats.take()


class Multi:
    """A MultiConnector that has ours and another one."""

    def __init__(self, ours: Connector) -> None:
        self.ours = ours
        self._connectors = [SimpleNamespace(), ours]

    def get_kv_connector_stats(self) -> Any:
        data = self.ours.get_kv_connector_stats()
        return {"DataDistConnector": data} if data else None


class World:
    """A scheduler of either release with one decode half."""

    def __init__(self, release: str, monkeypatch: pytest.MonkeyPatch, multi: bool = False) -> None:
        self.d = Decode()
        half = bare_half(decode=self.d.half)
        half.stats = self.d.stats
        connector = Connector(half)
        self.half = half
        self.output = Output032 if release == "0.32.0" else Output023
        module = ModuleType("vllm.v1.outputs")
        module.KVConnectorOutput = self.output
        monkeypatch.setitem(sys.modules, "vllm.v1.outputs", module)
        self.scheduler = SimpleNamespace(
            connector=Multi(connector) if multi else connector, requests={}, running=[], failed_recving_kv_req_ids=set()
        )
        if release == "0.32.0":
            self.scheduler._handle_failed_recving = None

    def start(self, request_id: str = "r") -> None:
        """A request that waits while its KV is pulled."""
        request = self.d.new(request_id)
        self.d.admit(request), self.d.deliver(request_id=request_id), self.d.half.take_tasks()
        self.scheduler.requests[request_id] = request
        request.num_computed_tokens = 39
        self.set_status(request_id, hooks.WAITING_STATUS)

    def set_status(self, request_id: str, name: str) -> None:
        request = self.scheduler.requests[request_id]
        request.status = SimpleNamespace(name=name)
        request.is_finished = lambda: name.startswith("FINISHED")

    def step(self, part: Any = None) -> Any:
        output = None if part is None else self.output(kv_connector_worker_meta=part)
        return hooks.merge_step_output(self.scheduler, output)


def bare_half(**values: Any) -> SchedulerHalf:
    """A SchedulerHalf without its threads."""
    half = object.__new__(SchedulerHalf)
    half.is_in_process, half.count_requests = False, None
    half._worker_problems, half._links, half.prefill, half.decode, half._pool = {}, {}, None, None, None
    for name, value in values.items():
        setattr(half, name, value)
    return half


@pytest.fixture(params=["0.32.0", "0.23.0"])
def release(request: pytest.FixtureRequest) -> str:
    return request.param


def good(request_id: str = "r") -> RankResult:
    return RankResult(request_id, "t1", 0, True, "", 10)


def bad(request_id: str = "r") -> RankResult:
    return RankResult(request_id, "t1", 0, False, "lease_expired")


# ---------------------------------------------------------------- merge_step_output


@pytest.mark.parametrize("wrap", [lambda m: m, in_multi], ids=["alone", "in a MultiConnector"])
def test_a_loaded_request_is_named_as_received_once(release, monkeypatch, wrap):
    world = World(release, monkeypatch)
    world.start()
    assert world.step(wrap(meta(good()))).finished_recving == {"r"}
    assert not getattr(world.step(wrap(meta(good()))), "finished_recving", None)


def test_what_others_received_is_kept(release, monkeypatch):
    world = World(release, monkeypatch)
    world.start()
    output = world.output(finished_recving={"theirs"}, kv_connector_worker_meta=meta(good()))
    assert hooks.merge_step_output(world.scheduler, output).finished_recving == {"theirs", "r"}


def test_a_request_that_computes_here_is_named_as_failed(release, monkeypatch):
    world = World(release, monkeypatch)
    world.start()
    world.d.compute_locally()
    output = world.step(meta(good()))
    assert output.finished_recving == {"r"}
    if release == "0.32.0":
        assert output.failed_recving == {"r"}
        assert world.scheduler.failed_recving_kv_req_ids == set(), "upstream sets its own flag"
    else:
        assert world.scheduler.failed_recving_kv_req_ids == {"r"}
        assert world.scheduler.requests["r"].num_computed_tokens == 0


def test_a_step_without_output_still_reports(release, monkeypatch):
    """The API server gave up in a step in which the workers had nothing to say."""
    world = World(release, monkeypatch)
    request = world.d.new()
    world.d.admit(request)
    world.scheduler.requests["r"] = request
    world.set_status("r", hooks.WAITING_STATUS)
    world.d.compute_locally()
    assert world.step().finished_recving == {"r"}


def test_an_aborted_request_is_freed_and_leaves_no_flag_behind(release, monkeypatch):
    """Given up, and aborted before the next step: upstream frees on the name alone and never takes a flag back."""
    world = World(release, monkeypatch)
    world.start()
    world.d.results(0, ok=False)
    world.d.compute_locally()
    world.set_status("r", "FINISHED_ABORTED")
    world.d.half.request_finished("r")
    assert world.step(meta()).finished_recving == {"r"}
    assert world.scheduler.failed_recving_kv_req_ids == set()


def test_requests_that_upstream_would_trip_over_are_not_named(release, monkeypatch):
    world = World(release, monkeypatch)
    world.start("gone"), world.d.half.peers.given_back.clear()
    del world.scheduler.requests["gone"]
    output = world.step(meta(good("gone")))
    assert not output.finished_recving
    world.scheduler.requests["running"] = SimpleNamespace()
    world.set_status("running", "RUNNING")
    monkeypatch.setattr(
        world.d.half, "step_ended", lambda _: [SimpleNamespace(request_id="running", ok=True, aborted=False)]
    )
    assert not world.step(meta()).finished_recving


def test_an_engine_without_a_pd_role_is_left_alone():
    for connector in (None, SimpleNamespace(), SimpleNamespace(_connectors=[SimpleNamespace()])):
        output = object()
        assert hooks.merge_step_output(SimpleNamespace(connector=connector), output) is output


@pytest.mark.parametrize("multi", [False, True])
def test_0230_gets_our_counts_in_the_shape_of_its_connector(monkeypatch, multi: bool):
    world = World("0.23.0", monkeypatch, multi)
    world.d.stats.count("bytes", 5)
    stats = world.step().kv_connector_stats
    assert stats == ({"DataDistConnector": {"bytes": 5}} if multi else {"bytes": 5})


def test_0230_in_process_counts_wait_for_a_step_that_answers_somebody(monkeypatch):
    world = World("0.23.0", monkeypatch)
    world.half.is_in_process = True
    world.d.stats.count("bytes", 5)
    assert world.step() is None
    for num_computed, expected in ((9, None), (10, {"bytes": 5}), (11, None)):
        world.scheduler.running = [SimpleNamespace(num_computed_tokens=num_computed, num_tokens=10)]
        assert getattr(world.step(), "kv_connector_stats", None) == expected


def test_0230_counts_are_not_taken_where_upstream_takes_them_itself(monkeypatch):
    world = World("0.23.0", monkeypatch)
    world.d.stats.count("bytes", 5)
    output = world.output(kv_connector_stats="theirs", kv_connector_worker_meta=meta())
    assert hooks.merge_step_output(world.scheduler, output).kv_connector_stats == "theirs"
    assert world.d.stats.take() == {"bytes": 5}


# ---------------------------------------------------------------- what ranks say of themselves


def test_problems_and_links_are_the_latest_that_each_rank_told(monkeypatch):
    world = World("0.32.0", monkeypatch)
    monkeypatch.setattr(
        world.d.half, "peers", SimpleNamespace(alive=lambda: True, last_beat=scheduler.time.monotonic())
    )
    world.step(
        in_multi(
            meta(problems={0: ["dead: a"], 1: ["stuck: b"]}, links={0: [{"cluster_id": 7}], 1: [{"cluster_id": 8}]})
        )
    )
    world.step(meta(problems={1: []}, links={1: []}))
    world.step(meta())
    assert world.half.problems() == ("dead: a",)
    peers = SimpleNamespace(
        peers=lambda: [SimpleNamespace(engine_id="p", ranks=[SimpleNamespace(cluster_id=7, host="h", port=9)])]
    )
    assert world.half._describe_links(peers) == [
        {"tp_rank": 0, "cluster_id": 7, "engine_id": "p", "host": "h", "port": 9}
    ]


# ---------------------------------------------------------------- skipped_block_remover


@pytest.mark.parametrize("name", ["processed_computed_tokens", "total_computed_tokens"])
@pytest.mark.parametrize(("computed", "kept"), [(10, 9), (0, 0)])
def test_a_handoff_keeps_one_more_token_of_each_window(name: str, computed: int, kept: int):
    calls: list[dict] = []
    owner = SimpleNamespace(kv_cache_manager=SimpleNamespace(remove_skipped_blocks=lambda **kw: calls.append(kw)))
    for params in ({"do_remote_decode": True}, None, {"do_remote_prefill": True}):
        request = SimpleNamespace(kv_transfer_params=params)
        hooks.skipped_block_remover(owner, request)(request_id="r", **{name: computed})
    assert [call[name] for call in calls] == [kept, computed, computed]
    assert {call["request_id"] for call in calls} == {"r"}


def test_the_number_of_prompt_tokens_is_passed_on_unchanged():
    calls: list[dict] = []
    owner = SimpleNamespace(kv_cache_manager=SimpleNamespace(remove_skipped_blocks=lambda **kw: calls.append(kw)))
    request = SimpleNamespace(kv_transfer_params={"do_remote_decode": True})
    hooks.skipped_block_remover(owner, request)(request_id="r", processed_computed_tokens=9, num_prompt_tokens=9)
    assert calls == [{"request_id": "r", "processed_computed_tokens": 8, "num_prompt_tokens": 9}]


# ---------------------------------------------------------------- the engine core


def core_with(connector: Any, **values: Any) -> SimpleNamespace:
    return SimpleNamespace(
        scheduler=SimpleNamespace(get_kv_connector=lambda: connector), input_queue=queue.Queue(), **values
    )


def test_a_wake_is_upstreams_own_message_and_draining_follows_it(monkeypatch):
    module = ModuleType("vllm.v1.engine")
    module.EngineCoreRequestType = SimpleNamespace(WAKEUP="wakeup")
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", module)
    d = Decode()
    core = core_with(Connector(half := bare_half(decode=d.half)))
    core.scheduler.get_num_unfinished_requests = lambda: 3
    hooks.attach_engine_core(core)
    assert half.count_requests is not None
    assert half.count_requests() == 3
    d.half.on_deliver(*delivery(d))
    assert core.input_queue.get_nowait() == ("wakeup", None)
    assert d.half._early == {}
    hooks.drain_engine_core(core)
    assert set(d.half._early) == {"r"}


def delivery(d: Decode) -> tuple[Any, Any]:
    from tests.unit.engine.fakes import make_handoff
    from vllm_ascend_pd.wire import DeliverHandoff

    return DeliverHandoff(request_id="r", handoff=make_handoff(), deadline_ms=1), SimpleNamespace(send=d._note)


def test_an_engine_core_without_a_pd_role_needs_nothing():
    core = core_with(None, shutdown_state=SimpleNamespace(name="REQUESTED"))
    hooks.attach_engine_core(core)
    hooks.drain_engine_core(core)
    hooks.hold_until_leases_end(core)


@pytest.mark.parametrize(
    ("state", "holds"), [("RUNNING", False), ("REQUESTED", True), ("SHUTTING_DOWN", True), (None, False)]
)
def test_only_an_orderly_shutdown_waits_for_readers(state, holds: bool):
    held: list[int] = []
    connector = SimpleNamespace(is_datadist=True, half=SimpleNamespace(hold_leases=lambda: held.append(1)))
    values = {} if state is None else {"shutdown_state": SimpleNamespace(name=state)}
    hooks.hold_until_leases_end(core_with(connector, **values))
    assert bool(held) is holds


class Clock:
    """Time that passes by sleeping; calls `at` when it is over a moment."""

    def __init__(self, at: dict[float, Any]) -> None:
        self.now, self.at = 100.0, dict(at)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for moment in [m for m in self.at if m <= self.now]:
            self.at.pop(moment)()


@pytest.mark.parametrize(("released_at", "until"), [(101.0, 101.1), (None, 130.1)])
def test_a_shutdown_waits_for_readers_at_most_one_term(monkeypatch, released_at, until: float):
    leases = LeaseTable(30.0, clock=lambda: 0.0)
    lease = leases.grant("t", ((1,),), None, True, None).lease
    release = lambda: leases.release(lease.lease_id, "t", 0, 1)  # noqa: E731
    clock = Clock({} if released_at is None else {released_at: release})
    monkeypatch.setattr(scheduler, "time", clock)
    bare_half(prefill=SimpleNamespace(leases=leases), config=SimpleNamespace(lease_s=30.0)).hold_leases()
    assert until - 0.2 < clock.now <= until
