# SPDX-License-Identifier: Apache-2.0
"""The control server: planes, replies, heartbeat, tick, binding errors."""

from __future__ import annotations

import queue
import threading
import time

import msgspec
import pytest
import zmq

from tests.unit.control.conftest import HANDLERS, ack, peer_address
from vllm_ascend_pd.control import server as server_module
from vllm_ascend_pd.control.client import ControlClient
from vllm_ascend_pd.control.server import Reply
from vllm_ascend_pd.errors import PDUnreachableError
from vllm_ascend_pd.wire import (
    MAX_FRAME_BYTES,
    Ack,
    CancelTransfer,
    ComputeLocally,
    HealthQuery,
    HealthReply,
    Hello,
    LeaseRelease,
    LeaseRenew,
    LeaseVerdict,
    LoadResult,
    Refused,
    StatusQuery,
    StatusReply,
)


def test_both_planes_answer_their_messages(servers, ask):
    server = servers.start()
    assert ask(servers.local(), HealthQuery()) == HealthReply()
    assert ask(peer_address(server), CancelTransfer(transfer_id="t")) == Ack()
    assert server.counters["local_requests"] == 1
    assert server.counters["peer_requests"] == 1
    assert server.counters["admitted"] == 1


def test_a_message_of_one_plane_is_refused_on_the_other(servers, ask):
    server = servers.start()
    for endpoint, message in (
        (peer_address(server), ComputeLocally(request_id="r", reason="")),
        (servers.local(), LeaseRelease(lease_id="l", transfer_id="t", rank=0, num_ranks=1)),
    ):
        answer = ask(endpoint, message)
        assert isinstance(answer, Refused)
        assert answer.code == "malformed"
    assert server.counters["malformed"] == 2
    assert server.counters["peer_malformed"] == server.counters["local_malformed"] == 1


def test_a_message_without_handler_is_refused_by_tag(servers, ask):
    servers.start()
    answer = ask(servers.local(), StatusQuery())
    assert isinstance(answer, Refused)
    assert answer.code == "unsupported"
    assert "'status'" in answer.message


def test_a_failing_handler_refuses_one_request_and_the_thread_goes_on(servers, ask):
    def fail(_message, _reply):
        raise KeyError("lost block")

    server = servers.start({**HANDLERS, StatusQuery: fail})
    answer = ask(servers.local(), StatusQuery())
    assert isinstance(answer, Refused)
    assert answer.code == "internal"
    assert "KeyError" in answer.message
    assert "lost block" in answer.message
    assert server.counters["handler_errors"] == 1
    assert ask(servers.local(), HealthQuery()) == HealthReply()
    assert server.alive()


def test_a_reply_may_come_later_from_another_thread_and_others_overtake_it(servers, ask, monkeypatch):
    # Without the wake-up the answer would wait for the end of the poll.
    monkeypatch.setattr(server_module, "MAX_BEAT_S", 60.0)
    monkeypatch.setattr(server_module, "MAX_TICK_S", 60.0)
    kept: queue.Queue[Reply] = queue.Queue()
    servers.start({**HANDLERS, StatusQuery: lambda _message, reply: kept.put(reply)})
    answers: queue.Queue = queue.Queue()
    waiter = threading.Thread(target=lambda: answers.put(ask(servers.local(), StatusQuery(), 30.0, 1)))
    waiter.start()
    reply = kept.get(timeout=5)
    assert ask(servers.local(), HealthQuery()) == HealthReply()
    assert answers.empty()
    assert reply.send(StatusReply(status={"ok": 1}))
    assert answers.get(timeout=10) == StatusReply(status={"ok": 1})
    waiter.join()


def test_only_the_first_answer_counts(servers, ask):
    second: queue.Queue[bool] = queue.Queue()

    def answer_twice(_message, reply):
        reply.send(StatusReply(status={"n": 1}))
        second.put(reply.send(StatusReply(status={"n": 2})))

    servers.start({StatusQuery: answer_twice})
    assert ask(servers.local(), StatusQuery()) == StatusReply(status={"n": 1})
    assert second.get(timeout=5) is False


def test_an_answer_over_the_frame_limit_becomes_a_refusal(servers, ask):
    big = StatusReply(status={"x": "y" * MAX_FRAME_BYTES})
    servers.start({StatusQuery: lambda _message, reply: reply.send(big)})
    answer = ask(servers.local(), StatusQuery())
    assert isinstance(answer, Refused)
    assert answer.code == "too_large"


def test_a_message_of_nearly_the_frame_limit_passes(servers, ask):
    servers.start()
    reason = "r" * (MAX_FRAME_BYTES - 100)
    assert ask(servers.local(), ComputeLocally(request_id="r", reason=reason)) == Ack()


def test_a_reply_after_close_is_dropped_quietly(servers):
    kept: queue.Queue[Reply] = queue.Queue()
    server = servers.start({StatusQuery: lambda _message, reply: kept.put(reply)})
    client = ControlClient(servers.local())
    waiter = threading.Thread(target=lambda: pytest.raises(PDUnreachableError, client.request, StatusQuery(), 0.5, 1))
    waiter.start()
    reply = kept.get(timeout=5)
    server.close()
    reply.send(StatusReply(status={}))
    waiter.join()
    client.close()


def test_answers_given_before_close_are_still_sent(servers):
    server = servers.start({StatusQuery: lambda _message, reply: kept.put(reply)})
    kept: queue.Queue[Reply] = queue.Queue()
    answers: queue.Queue = queue.Queue()
    client = ControlClient(servers.local())
    waiter = threading.Thread(target=lambda: answers.put(client.request(StatusQuery(), 10, 1)))
    waiter.start()
    kept.get(timeout=5).send(StatusReply(status={"last": True}))
    server.close()
    assert answers.get(timeout=5) == StatusReply(status={"last": True})
    waiter.join()
    client.close()


def test_the_heartbeat_is_fresh_when_idle_and_stale_while_a_handler_is_stuck(servers):
    release = threading.Event()
    entered = threading.Event()

    def stick(_message, reply):
        entered.set()
        release.wait(10)
        reply.send(StatusReply(status={}))

    server = servers.start({StatusQuery: stick})
    first = server.last_beat
    deadline = time.monotonic() + 5
    while server.last_beat == first:  # idle: it still beats
        assert time.monotonic() < deadline
    assert server_module.MAX_BEAT_S <= 0.5
    client = ControlClient(servers.local())
    waiter = threading.Thread(target=client.request, args=(StatusQuery(), 10, 1))
    waiter.start()
    assert entered.wait(5)
    stuck_at = server.last_beat
    threading.Event().wait(0.3)
    assert server.last_beat == stuck_at
    assert server.alive()
    release.set()
    waiter.join()
    client.close()


def test_tick_comes_earlier_when_it_says_so(servers, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_BEAT_S", 60.0)
    monkeypatch.setattr(server_module, "MAX_TICK_S", 60.0)
    calls: list[float] = []
    enough = threading.Event()

    def tick():
        calls.append(time.monotonic())
        if len(calls) >= 5:
            enough.set()
        return calls[-1] + 0.005

    servers.start(tick=tick)
    assert enough.wait(10)


@pytest.mark.parametrize("wanted_s", [None, 3600.0])
def test_tick_comes_again_soon_whatever_it_says(servers, wanted_s):
    calls: list[float] = []
    enough = threading.Event()

    def tick():
        calls.append(time.monotonic())
        if len(calls) >= 4:
            enough.set()
        return None if wanted_s is None else calls[-1] + wanted_s

    servers.start(tick=tick)
    assert enough.wait(10)
    assert server_module.MAX_TICK_S <= 0.1


def test_a_failing_tick_is_counted_and_called_again(servers, ask):
    def tick():
        raise RuntimeError("tick")

    server = servers.start(tick=tick)
    deadline = time.monotonic() + 5
    while server.counters["tick_errors"] < 2:
        assert time.monotonic() < deadline
    assert ask(servers.local(), HealthQuery()) == HealthReply()


def test_a_flood_with_slow_handlers_starves_neither_tick_nor_heartbeat_nor_the_other_plane(servers, ask):
    ticks: list[int] = []
    num_served = 0

    def slow(message, reply):
        nonlocal num_served
        num_served += 1
        until = time.monotonic() + 0.004
        while time.monotonic() < until:
            pass
        ack(message, reply)

    server = servers.start({**HANDLERS, ComputeLocally: slow}, tick=lambda: ticks.append(num_served))
    payload = msgspec.msgpack.encode(ComputeLocally(request_id="r", reason=""))
    answered = threading.Event()

    def flood() -> None:
        """Keeps 300 requests (over a second of work) waiting until the other plane was answered."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
            sock.linger = 0
            sock.connect(servers.local())
            num_waiting = 0
            while not answered.is_set():
                while num_waiting < 300:
                    sock.send_multipart([b"12345678", payload])
                    num_waiting += 1
                while sock.poll(10):
                    sock.recv_multipart()
                    num_waiting -= 1

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        # Starved, it would have to wait for as long as the flood goes on: for ever.
        assert ask(peer_address(server), CancelTransfer(transfer_id="t"), 20, 1) == Ack()
        while num_served < 100:
            assert thread.is_alive()
            time.sleep(0.01)
    finally:
        answered.set()
        thread.join()
    # 100 ms are 25 messages; all of a batch (64) between two ticks would be too many.
    assert max(after - before for before, after in zip(ticks, ticks[1:], strict=False)) <= 40


def test_typed_messages_arrive_with_their_fields(servers, ask):
    seen: queue.Queue = queue.Queue()

    def verdict(message, reply):
        seen.put(message)
        reply.send(LeaseVerdict(held=True, state="held", remaining_ms=5))

    def hello(message, reply):
        seen.put(message)
        ack(message, reply)

    server = servers.start({LeaseRenew: verdict, Hello: hello})
    renew = LeaseRenew(lease_id="l", transfer_id="t", rank=1, num_ranks=2)
    assert ask(peer_address(server), renew) == LeaseVerdict(held=True, state="held", remaining_ms=5)
    assert seen.get(timeout=5) == renew
    greeting = Hello(wire_version=1, engine_id="e", epoch="x", record={"layers": [1, 2], "deep": {"a": None}})
    assert ask(peer_address(server), greeting) == Ack()
    assert seen.get(timeout=5) == greeting


def test_every_answer_type_survives_the_wire(servers, ask):
    answers = [Ack(), Refused(code="c", message="m", field="f"), LoadResult(outcome="loaded", pull_ms=1.5)]
    left = iter(answers)
    servers.start({StatusQuery: lambda _message, reply: reply.send(next(left))})
    assert [ask(servers.local(), StatusQuery(), attempts=1) for _ in answers] == answers
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Ack())) == {"type": "ack"}
