# SPDX-License-Identifier: Apache-2.0
"""A decode engine core's prefill engines, over real control servers on loopback: handshakes, epochs, give-backs."""

from __future__ import annotations

import queue
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_ascend_pd.control.server import ControlServer
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.transfer import clients as clients_module
from vllm_ascend_pd.transfer import peers as module
from vllm_ascend_pd.transfer.clients import ClientTable
from vllm_ascend_pd.transfer.peers import PeerTable
from vllm_ascend_pd.wire import (
    Ack,
    CancelTransfer,
    Handoff,
    Hello,
    HelloReply,
    LeaseRelease,
    LeaseVerdict,
    RankAddress,
    Refused,
)

SECRET = Secret(b"the secret of a deployment")
RECORD = {"dtype": "float32", "transports": ["mapped"]}
WAIT_S = 20


class Prefill:
    """The peer plane of a prefill engine; `hello` is what it answers."""

    def __init__(self, directory: Path, port: int = 0, epoch: str = "e1", secret: Secret = SECRET) -> None:
        self.epoch = epoch
        self.asked: queue.SimpleQueue = queue.SimpleQueue()
        self.hello = HelloReply(
            engine_id="pd-p",
            epoch=epoch,
            record=RECORD,
            ranks=(RankAddress(tp_rank=0, cluster_id=len(epoch) + 40, host="127.0.0.1", port=1),),
        )
        handlers = {
            Hello: lambda message, reply: self._note(message) or reply.send(self.hello),
            CancelTransfer: lambda message, reply: self._note(message) or reply.send(Ack()),
            LeaseRelease: lambda message, reply: (
                self._note(message) or reply.send(LeaseVerdict(held=True, state="held"))
            ),
        }
        self.server = ControlServer(
            str(directory / f"{epoch}.sock"), f"tcp://127.0.0.1:{port or '*'}", secret, handlers
        )
        self.server.start()
        self.port = self.server.peer_port

    def _note(self, message) -> None:
        self.asked.put(message)

    def next(self):
        return self.asked.get(timeout=WAIT_S)


class Decode:
    """A PeerTable; `gone` collects engines that were replaced."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.gone: list = []
        self.table = PeerTable("pd-d", "e-d", RECORD, SECRET, num_ranks, self.gone.append)

    def connect(self, port: int):
        answers: queue.SimpleQueue = queue.SimpleQueue()
        self.table.connect("127.0.0.1", port, answers.put)
        return answers.get(timeout=WAIT_S)

    def resolve(self, handoff: Handoff):
        answers: queue.SimpleQueue = queue.SimpleQueue()
        self.table.resolve(handoff, lambda peer, reason: answers.put((peer, reason)))
        return answers.get(timeout=WAIT_S)


def make_handoff(port: int, epoch: str = "e1", transfer_id: str = "t1") -> Handoff:
    return Handoff(
        transfer_id=transfer_id, lease_id=f"lease-{transfer_id}", engine_id="pd-p", epoch=epoch, host="127.0.0.1",
        port=port, num_tokens=1, prompt_digest="", block_ids=((1,),), layout="", lease_ms=1000,
    )  # fmt: skip


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="pd") as name:
        yield Path(name)


@pytest.fixture
def prefill(directory: Path):
    prefill = Prefill(directory)
    yield prefill
    prefill.server.close()


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "HELLO_TIMEOUT_S", 5.0)
    monkeypatch.setattr(module, "GIVE_BACK_TIMEOUT_S", 5.0)
    decode = Decode()
    yield decode
    decode.table.close()
    assert not decode.table.alive()


# ---------------------------------------------------------------- handshakes


def test_an_engine_whose_record_agrees_is_linked_and_listed(prefill: Prefill, decode: Decode):
    result = decode.connect(prefill.port)
    assert (result.outcome, result.engine_id, result.epoch) == ("linked", "pd-p", "e1")
    (peer,) = decode.table.peers()
    assert (peer.port, peer.ranks) == (prefill.port, prefill.hello.ranks)
    assert prefill.next().record == RECORD


def test_a_refusal_of_the_prefill_side_is_passed_on_by_field(prefill: Prefill, decode: Decode):
    prefill.hello = Refused(code="handshake", message="x", field="dtype", ours="bfloat16", theirs="float32")
    result = decode.connect(prefill.port)
    assert (result.outcome, result.refused.field, result.refused.ours) == ("refused", "dtype", "bfloat16")
    assert decode.table.peers() == []


def test_the_decode_side_compares_too(prefill: Prefill, decode: Decode):
    prefill.hello = HelloReply(engine_id="pd-p", epoch="e1", record={**RECORD, "dtype": "float16"}, ranks=())
    result = decode.connect(prefill.port)
    assert (result.outcome, result.refused.field) == ("refused", "dtype")
    assert (result.refused.ours, result.refused.theirs) == ("float32", "float16")
    assert decode.table.peers() == []


@pytest.mark.parametrize("why", ["nobody", "another secret"])
def test_an_engine_that_does_not_answer_is_unreachable(
    directory: Path, decode: Decode, why: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "HELLO_TIMEOUT_S", 0.5)
    prefill = Prefill(directory, secret=Secret(b"another"))
    if why == "nobody":
        prefill.server.close()
    result = decode.connect(prefill.port)
    prefill.server.close()
    assert result.outcome == "unreachable"
    assert str(prefill.port) in result.detail


def test_whoever_waits_for_a_handshake_hears_of_an_unexpected_exception(prefill: Prefill, decode: Decode, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("x")

    monkeypatch.setattr(module, "compare", broken)
    assert decode.connect(prefill.port).outcome == "unreachable"
    assert decode.resolve(make_handoff(prefill.port)) == (None, "peer: x")
    assert decode.table.alive()


# ---------------------------------------------------------------- handoffs


def test_a_handoff_of_an_unknown_engine_waits_for_its_handshake(prefill: Prefill, decode: Decode):
    handoff = make_handoff(prefill.port)
    assert decode.table.known(handoff) is None
    peer, reason = decode.resolve(handoff)
    assert (peer.engine_id, reason) == ("pd-p", "")
    assert decode.table.known(handoff) == peer


def test_a_handoff_of_a_known_engine_goes_on_in_the_same_call(prefill: Prefill, decode: Decode):
    decode.connect(prefill.port)
    found: list = []
    decode.table.resolve(make_handoff(prefill.port), lambda peer, _: found.append(peer.epoch))
    assert found == ["e1"]


def test_a_handoff_of_an_engine_that_has_been_replaced_is_refused(prefill: Prefill, decode: Decode):
    peer, reason = decode.resolve(make_handoff(prefill.port, epoch="e0"))
    assert peer is None
    assert reason.startswith("peer: engine pd-p of this handoff has been replaced")


def test_a_restart_at_the_same_address_drops_the_old_engine_once(directory: Path, decode: Decode):
    old = Prefill(directory)
    decode.connect(old.port)
    old.server.close()
    new = Prefill(directory, port=old.port, epoch="e-two")
    try:
        assert decode.connect(new.port).epoch == "e-two"
        assert decode.connect(new.port).epoch == "e-two"
        assert [(peer.epoch, peer.ranks) for peer in decode.gone] == [("e1", old.hello.ranks)]
        assert decode.table.known(make_handoff(new.port, "e1")) is None
        assert decode.table.known(make_handoff(new.port, "e-two")) is not None
        assert len(decode.table.peers()) == 1
    finally:
        new.server.close()


def test_engines_of_the_past_do_not_pile_up(directory: Path, decode: Decode, monkeypatch: pytest.MonkeyPatch):
    """The least recently used is forgotten and its links are dropped; it is asked again when it hands over."""
    monkeypatch.setattr(module, "MAX_PEERS", 1)
    first, second = Prefill(directory), Prefill(directory, epoch="e-two")
    try:
        decode.connect(first.port)
        decode.connect(second.port)
        assert [peer.epoch for peer in decode.table.peers()] == ["e-two"]
        assert [peer.epoch for peer in decode.gone] == ["e1"]
        assert decode.resolve(make_handoff(first.port))[0].epoch == "e1"
    finally:
        first.server.close()
        second.server.close()


# ---------------------------------------------------------------- give-backs


def test_a_lease_that_will_not_be_read_is_cancelled(prefill: Prefill, decode: Decode):
    decode.table.give_back(make_handoff(prefill.port), False)
    assert prefill.next() == CancelTransfer(transfer_id="t1")


def test_a_lease_with_nothing_to_move_is_released_by_every_rank(prefill: Prefill):
    decode = Decode(num_ranks=2)
    decode.table.give_back(make_handoff(prefill.port), True)
    messages = [prefill.next(), prefill.next()]
    decode.table.close()
    assert [(m.lease_id, m.rank, m.num_ranks, m.reader) for m in messages] == [
        ("lease-t1", 0, 2, "e-d"),
        ("lease-t1", 1, 2, "e-d"),
    ]


def test_give_backs_that_queued_behind_a_silent_engine_are_left_to_expire(
    directory: Path, prefill: Prefill, decode: Decode, monkeypatch: pytest.MonkeyPatch
):
    """A dead engine costs one timeout, not one for each of its leases."""
    monkeypatch.setattr(module, "GIVE_BACK_TIMEOUT_S", 0.3)
    dead = Prefill(directory, epoch="e-dead")
    dead.server.close()
    tried: list[str] = []
    real = decode.table._give_back

    def counted(handoff: Handoff, moved: bool, asked: float) -> None:
        if not decode.table._clients.was_silent_since(handoff.host, handoff.port, asked):
            tried.append(handoff.transfer_id)
        real(handoff, moved, asked)

    monkeypatch.setattr(decode.table, "_give_back", counted)
    for index in range(5):
        decode.table.give_back(make_handoff(dead.port, transfer_id=f"dead{index}"), False)
    decode.table.give_back(make_handoff(prefill.port, transfer_id="living"), False)
    assert prefill.next() == CancelTransfer(transfer_id="living")
    assert tried == ["dead0", "living"]


def test_closing_finishes_what_was_to_be_given_back(prefill: Prefill):
    decode = Decode()
    for index in range(3):
        decode.table.give_back(make_handoff(prefill.port, transfer_id=f"t{index}"), False)
    decode.table.close()
    assert [prefill.asked.get_nowait().transfer_id for _ in range(3)] == ["t0", "t1", "t2"]


# ---------------------------------------------------------------- connections


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list:
    made: list = []

    def make(endpoint: str, secret: Secret) -> SimpleNamespace:
        client = SimpleNamespace(endpoint=endpoint, closed=False)
        client.close = lambda: setattr(client, "closed", True)
        made.append(client)
        return client

    monkeypatch.setattr(clients_module, "ControlClient", make)
    return made


def test_a_connection_is_made_once_per_address_and_the_oldest_goes(made: list):
    table = ClientTable(SECRET, limit=2)
    first = table.get("10.0.0.1", 1)
    table.get("::1", 2)
    assert table.get("10.0.0.1", 1) is first
    table.get("10.0.0.3", 3)
    assert [(c.endpoint, c.closed) for c in made] == [
        ("tcp://10.0.0.1:1", False), ("tcp://[::1]:2", True), ("tcp://10.0.0.3:3", False),
    ]  # fmt: skip
    table.close()
    assert all(c.closed for c in made)


def test_silence_is_about_what_was_asked_before_it(made: list, monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(now=10.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(clients_module, "time", clock)
    table = ClientTable(SECRET, limit=1)
    table.get("h", 1)
    table.note_silence("h", 1)
    assert [table.was_silent_since("h", 1, moment) for moment in (9.0, 11.0)] == [True, False]
    assert not table.was_silent_since("h", 2, 9.0)
    table.get("h", 2)
    assert not table.was_silent_since("h", 1, 9.0), "nothing is kept of an address that was forgotten"
