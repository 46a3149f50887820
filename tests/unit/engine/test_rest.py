# SPDX-License-Identifier: Apache-2.0
"""An engine core whose requests all wait for handoffs sleeps until somebody wakes it, and never when it must step."""

from __future__ import annotations

import queue
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.engine.fakes import Decode, make_handoff
from tests.unit.engine.test_hooks import Connector, bare_half, delivery
from vllm_ascend_pd.engine import hooks
from vllm_ascend_pd.transfer.tasks import DropPeer


class WaitingCore:
    """An engine core whose requests are those of a DecodeHalf; notes what it takes from its queue."""

    def __init__(self, d: Decode, **values: Any) -> None:
        self.taken: list[Any] = []
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.batch_queue: Any = None
        self.process_input_queue_block = True
        self.runs, self.works = True, True
        self.scheduler = SimpleNamespace(
            get_kv_connector=lambda: Connector(bare_half(decode=d.half)), finished_req_ids=set(), requests={}
        )
        self.__dict__.update(values)

    def is_running(self) -> bool:
        return self.runs

    def has_work(self) -> bool:
        return self.works

    def _handle_client_request(self, *message: Any) -> None:
        self.taken.append(message)

    def rests(self, model_executed: bool = False) -> bool:
        """Whether it would have slept until the next message."""
        self.input_queue.put(("message",))
        hooks.rest_engine_core(self, model_executed)
        return bool(self.taken)


def waiting(**values: Any) -> tuple[Decode, WaitingCore]:
    """One admitted request without a handoff."""
    d = Decode()
    request = d.new()
    core = WaitingCore(d, **values)
    core.scheduler.requests["r"] = request
    d.admit(request)
    return d, core


def test_an_engine_core_that_only_waits_for_handoffs_sleeps_until_the_next_message():
    _, core = waiting()
    assert core.rests()
    assert core.taken == [("message",)]


def test_it_steps_when_a_deadline_needs_it():
    d, core = waiting()
    d.now = 5 + 10 - 0.05  # of the request, and the engine's grace
    began = time.monotonic()
    hooks.rest_engine_core(core, False)
    assert 0.04 < time.monotonic() - began < 5
    d.now = 15.1
    assert not core.rests()
    assert [f.request_id for f in d.half.step_ended([])] == ["r"]


@pytest.mark.parametrize(
    "values",
    [
        {"batch_queue": [1]},
        {"dp_group": object()},
        {"process_input_queue_block": False},
        {"runs": False},
        {"works": False},
    ],
    ids=lambda values: next(iter(values)),
)
def test_it_steps_when_others_count_on_it(values: dict[str, Any]):
    assert not waiting(**values)[1].rests()


@pytest.mark.parametrize(
    "what", ["model ran", "finished request", "ec connector", "another request", "a drop", "an early offer"]
)
def test_it_steps_when_there_is_something_to_do(what: str):
    d, core = waiting()
    match what:
        case "finished request":
            core.scheduler.finished_req_ids.add("q")
        case "ec connector":
            core.scheduler.ec_connector = object()
        case "another request":
            core.scheduler.requests["other"] = object()
        case "an early offer":
            d.deliver(make_handoff("t9"), request_id="later")
        case "a drop":
            d.half._drops.append(DropPeer((1,)))
    assert not core.rests(model_executed=what == "model ran")


@pytest.mark.parametrize(
    "what", ["not admitted", "pulling", "unread message", "ended untold", "other ended untold", "local", "no request"]
)
def test_it_steps_while_a_load_needs_it(what: str):
    d, core = waiting()
    match what:
        case "not admitted":
            core.scheduler.requests["s"] = d.new("s")
        case "pulling":
            d.deliver()
        case "unread message":
            d.half.on_deliver(*delivery(d))
        case "ended untold" | "local":
            d.compute_locally()
            if what == "local":
                assert d.half.step_ended([])
        case "other ended untold":
            d.admit(d.new("s"))
            d.half.request_finished("s")
        case "no request":
            d.half.request_finished("r")
            d.half.step_ended([])
            core.scheduler.requests.clear()
    assert not core.rests()


@pytest.mark.parametrize("connector", [None, SimpleNamespace(theirs=1)])
def test_without_our_connector_nothing_sleeps(connector: Any):
    core = WaitingCore(Decode())
    core.scheduler.get_kv_connector = lambda: connector
    assert not core.rests()


def test_a_prefill_engine_does_not_sleep():
    core = WaitingCore(Decode())
    core.scheduler.get_kv_connector = lambda: Connector(bare_half())
    assert not core.rests()
