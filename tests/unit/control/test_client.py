# SPDX-License-Identifier: Apache-2.0
"""Control clients: retries under one id, restarts of the server, many at a time, errors that say what to check."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
import time

import msgspec
import pytest
import zmq

from tests.unit.control.conftest import HANDLERS, SECRET, peer_address
from vllm_ascend_pd.control import client as client_module
from vllm_ascend_pd.control.client import AsyncControlClient, ControlClient
from vllm_ascend_pd.control.server import Reply
from vllm_ascend_pd.errors import PDUnreachableError
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.wire import (
    MAX_FRAME_BYTES,
    Ack,
    CancelTransfer,
    ComputeLocally,
    DeliverHandoff,
    Handoff,
    HealthQuery,
    HealthReply,
    LoadResult,
    StatusQuery,
    StatusReply,
)

HANDOFF = Handoff(
    transfer_id="t",
    lease_id="l",
    engine_id="e",
    epoch="x",
    host="h",
    port=1,
    num_tokens=1,
    prompt_digest="d",
    block_ids=((1,),),
    layout="f",
    lease_ms=1,
)


@pytest.fixture
def connect():
    clients = []

    def make(endpoint, secret=SECRET):
        clients.append(ControlClient(endpoint, secret))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
async def connect_async():
    clients = []

    def make(endpoint, secret=SECRET):
        clients.append(AsyncControlClient(endpoint, secret))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ------------------------------------------------------------------ errors


def test_a_closed_port_is_named_as_such(connect):
    port = closed_port()
    with pytest.raises(PDUnreachableError) as caught:
        connect(f"tcp://127.0.0.1:{port}").request(CancelTransfer(transfer_id="t"), 0.3, 2)
    message = str(caught.value)
    assert f"tcp://127.0.0.1:{port}" in message
    assert "refused" in message
    assert "asked 2 times" in message
    assert "secret" not in message


def test_another_secret_cannot_talk_and_the_error_says_so(servers, connect):
    server = servers.start()
    stranger = connect(peer_address(server), Secret(b"the secret of another deployment"))
    with pytest.raises(PDUnreachableError, match="--pd-secret-file"):
        stranger.request(CancelTransfer(transfer_id="t"), 0.5, 2)
    assert server.counters["peer_requests"] == 0


async def test_another_secret_cannot_talk_asynchronously(servers, connect_async):
    server = servers.start()
    stranger = connect_async(peer_address(server), Secret(b"the secret of another deployment"))
    with pytest.raises(PDUnreachableError, match="--pd-secret-file"):
        await stranger.request(CancelTransfer(transfer_id="t"), 0.5, 2)
    assert server.counters["peer_requests"] == 0


def test_a_missing_local_socket_is_named(tmp_path, connect):
    with pytest.raises(PDUnreachableError, match="not running"):
        connect(f"ipc://{tmp_path}/core.sock").request(HealthQuery(), 0.2, 1)


def test_an_unknown_host_is_named_at_once(connect):
    started = time.monotonic()
    with pytest.raises(PDUnreachableError, match=r"no\.such\.host\.invalid"):
        connect("tcp://no.such.host.invalid:1").request(CancelTransfer(transfer_id="t"), 30, 1)
    assert time.monotonic() - started < 20


def test_a_request_over_the_frame_limit_is_the_callers_error(connect, tmp_path):
    with pytest.raises(ValueError, match=str(MAX_FRAME_BYTES)):
        connect(f"{tmp_path}/x.sock").request(ComputeLocally(request_id="r", reason="x" * MAX_FRAME_BYTES), 1, 1)


def test_an_answer_in_another_protocol_is_an_error_not_an_object(connect, tmp_path):
    context = zmq.Context()
    other = context.socket(zmq.ROUTER)
    other.bind(f"ipc://{tmp_path}/x.sock")

    def answer_once():
        identity, request_id, _ = other.recv_multipart()
        other.send_multipart([identity, request_id, msgspec.msgpack.encode({"type": "surprise"})])

    thread = threading.Thread(target=answer_once)
    thread.start()
    with pytest.raises(PDUnreachableError, match="another protocol"):
        connect(f"ipc://{tmp_path}/x.sock").request(HealthQuery(), 5, 1)
    thread.join()
    other.close(0)
    context.term()


# ------------------------------------------------------------------ retries


def test_a_lost_answer_is_asked_for_again_under_the_same_id(servers, connect):
    seen: list[tuple[bytes, bytes]] = []

    def forget_first(_message, reply: Reply):
        seen.append(reply._envelope)
        if len(seen) > 1:
            reply.send(StatusReply(status={"asked": len(seen)}))

    servers.start({StatusQuery: forget_first})
    assert connect(servers.local()).request(StatusQuery(), 4, 10) == StatusReply(status={"asked": 2})
    assert len(set(seen)) == 1


def test_late_and_double_answers_of_earlier_requests_are_dropped(servers, connect):
    kept: list[Reply] = []

    def delay_first(_message, reply: Reply):
        kept.append(reply)
        if len(kept) == 2:
            for n, earlier in enumerate(kept):
                earlier.send(StatusReply(status={"n": n}))
        if len(kept) > 2:
            reply.send(StatusReply(status={"n": len(kept)}))

    servers.start({StatusQuery: delay_first})
    client = connect(servers.local())
    assert client.request(StatusQuery(), 4, 10) == StatusReply(status={"n": 0})
    # The socket is used again, with the second answer to the first request still in it.
    assert client.request(StatusQuery(), 4, 10) == StatusReply(status={"n": 3})


def test_a_server_that_restarts_between_request_and_retry_answers_the_retry(servers, connect):
    first = queue.Queue()
    server = servers.start({**HANDLERS, CancelTransfer: lambda _message, reply: first.put(reply)})
    answers: queue.Queue = queue.Queue()
    client = connect(peer_address(server))
    thread = threading.Thread(target=lambda: answers.put(client.request(CancelTransfer(transfer_id="t"), 20, 40)))
    thread.start()
    first.get(timeout=5)  # the request is in a server that will never answer
    server.close()
    servers.start(peer=peer_address(server))
    assert answers.get(timeout=15) == Ack()
    thread.join()


async def test_an_async_request_survives_a_restart_of_the_server(servers, connect_async):
    first: queue.Queue = queue.Queue()
    server = servers.start({HealthQuery: lambda _message, reply: first.put(reply)})
    client = connect_async(servers.local())
    request = asyncio.create_task(client.request(HealthQuery(), 20, 40))
    await asyncio.to_thread(first.get, timeout=5)
    server.close()
    servers.start()
    assert await request == HealthReply()


# ------------------------------------------------------------------ concurrency


def test_threads_share_a_client_and_do_not_wait_for_each_other(servers, connect):
    kept: queue.Queue = queue.Queue()
    servers.start({**HANDLERS, StatusQuery: lambda _message, reply: kept.put(reply)})
    client = connect(servers.local())
    slow = threading.Thread(target=client.request, args=(StatusQuery(), 20, 1))
    slow.start()
    reply = kept.get(timeout=5)
    assert client.request(HealthQuery(), 5, 1) == HealthReply()
    reply.send(StatusReply(status={}))
    slow.join()


def test_many_threads_each_get_their_own_answer(servers, connect):
    def echo(message, reply):
        reply.send(LoadResult(outcome="gone", reason=message.request_id))

    servers.start({ComputeLocally: echo})
    client = connect(servers.local())
    wrong: list[str] = []

    def ask(number: int):
        for i in range(20):
            name = f"{number}-{i}"
            answer = client.request(ComputeLocally(request_id=name, reason=""), 10, 1)
            if answer.reason != name:
                wrong.append(name)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(client._idle) <= client_module.MAX_IDLE_SOCKETS


async def test_200_async_requests_are_answered_out_of_order_each_with_its_own(servers, connect_async):
    kept: list[tuple[str, Reply]] = []
    all_there = threading.Event()

    def keep(message, reply):
        kept.append((message.request_id, reply))
        if len(kept) == 200:
            all_there.set()

    servers.start({DeliverHandoff: keep})
    client = connect_async(servers.local())
    requests = [
        asyncio.create_task(client.request(DeliverHandoff(request_id=f"r{n}", handoff=HANDOFF, deadline_ms=1), 30, 1))
        for n in range(200)
    ]
    assert await asyncio.to_thread(all_there.wait, 10)
    assert not any(request.done() for request in requests)

    def answer_backwards():
        for request_id, reply in reversed(kept):
            reply.send(LoadResult(outcome="loaded", reason=request_id))

    await asyncio.to_thread(answer_backwards)
    answers = await asyncio.gather(*requests)
    assert [answer.reason for answer in answers] == [f"r{n}" for n in range(200)]


async def test_a_cancelled_async_request_leaves_nothing_behind_and_others_go_on(servers, connect_async):
    kept: queue.Queue = queue.Queue()
    servers.start({**HANDLERS, StatusQuery: lambda _message, reply: kept.put(reply)})
    client = connect_async(servers.local())
    request = asyncio.create_task(client.request(StatusQuery(), 30, 1))
    reply = await asyncio.to_thread(kept.get, timeout=5)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert client._waiting == {}
    reply.send(StatusReply(status={}))  # an answer that nobody waits for
    assert await client.request(HealthQuery(), 5, 1) == HealthReply()


async def test_a_cancellation_is_never_swallowed_wherever_the_request_is(servers, connect_async):
    servers.start({StatusQuery: lambda _message, _reply: None})
    client = connect_async(servers.local())
    for num_turns in range(60):
        request = asyncio.create_task(client.request(StatusQuery(), 30, 1))
        for _ in range(num_turns % 12):
            await asyncio.sleep(0)
        request.cancel()
        done, _ = await asyncio.wait({request}, timeout=5)
        assert done
        assert request.cancelled()
    assert client._waiting == {}


async def test_closing_an_async_client_ends_its_requests(servers, connect_async):
    kept: queue.Queue = queue.Queue()
    servers.start({StatusQuery: lambda _message, reply: kept.put(reply)})
    client = connect_async(servers.local())
    request = asyncio.create_task(client.request(StatusQuery(), 30, 3))
    await asyncio.to_thread(kept.get, timeout=5)
    client.close()
    with pytest.raises(PDUnreachableError, match="closed"):
        await asyncio.wait_for(request, 2)
    with pytest.raises(PDUnreachableError, match="closed"):
        await client.request(StatusQuery(), 1, 1)


async def test_an_async_timeout_names_address_and_cause(servers, connect_async):
    servers.start({StatusQuery: lambda _message, _reply: None})
    with pytest.raises(PDUnreachableError, match=r"core\.sock did not answer within 0\.3 s .asked 2 times.*stuck"):
        await connect_async(servers.local()).request(StatusQuery(), 0.3, 2)


async def test_the_event_loop_is_free_while_a_request_waits(servers, connect_async):
    servers.start({StatusQuery: lambda _message, _reply: None})
    request = asyncio.create_task(connect_async(servers.local()).request(StatusQuery(), 1.0, 1))
    gaps, last = [], time.monotonic()
    while not request.done():
        await asyncio.sleep(0.005)
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
    assert isinstance(request.exception(), PDUnreachableError)
    assert max(gaps) < 0.7


# ------------------------------------------------------------------ life cycle


def test_closing_while_a_thread_waits_neither_hangs_nor_breaks_it(servers):
    kept: queue.Queue = queue.Queue()
    servers.start({StatusQuery: lambda _message, reply: kept.put(reply)})
    client = ControlClient(servers.local())
    answers: queue.Queue = queue.Queue()
    thread = threading.Thread(target=lambda: answers.put(client.request(StatusQuery(), 10, 1)))
    thread.start()
    reply = kept.get(timeout=5)
    client.close()
    reply.send(StatusReply(status={}))
    assert answers.get(timeout=5) == StatusReply(status={})
    thread.join()
    assert client._context is None
    with pytest.raises(PDUnreachableError, match="closed"):
        client.request(StatusQuery(), 1, 1)
    client.close()


def test_a_client_used_before_a_fork_works_in_parent_and_child(servers, connect):
    servers.start()
    client = connect(servers.local())
    assert client.request(HealthQuery(), 5, 1) == HealthReply()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if client.request(HealthQuery(), 5, 1) == HealthReply() else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.request(HealthQuery(), 5, 1) == HealthReply()


def test_a_failed_request_does_not_keep_its_socket(connect, tmp_path):
    client = connect(f"ipc://{tmp_path}/x.sock")
    for _ in range(2):
        with pytest.raises(PDUnreachableError):
            client.request(HealthQuery(), 0.05, 1)
    assert client._idle == []
    assert client._busy == 0
