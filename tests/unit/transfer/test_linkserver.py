# SPDX-License-Identifier: Apache-2.0
"""The prefill side of links: many ranks link to many by rank table, and nobody waits for ever.

The engines here are made up to be as bad as the interface allows: `link` returns when the other side has called it too,
and a process makes one at a time.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from tests.unit.transfer.fakes import MODULE, LLMException
from vllm_ascend_pd.datadist.api import Way
from vllm_ascend_pd.datadist.pair_table import build_pair_table, digest
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.transfer import linkserver
from vllm_ascend_pd.transfer.clients import ClientTable
from vllm_ascend_pd.transfer.linking import Asker, LinkFailedError, TwoSidedLinker
from vllm_ascend_pd.transfer.linkserver import LinkServer
from vllm_ascend_pd.wire import DeviceAddress, LinkAsk, LinkState, RankAddress

SECRET = Secret(b"s" * 32)
LINK_S = 3.0  # after which an engine gives up


class Meeting:
    """Where both sides of a communicator wait for one another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._barriers: dict[str, threading.Barrier] = {}

    def wait(self, name: str) -> None:
        with self._lock:
            barrier = self._barriers.setdefault(name, threading.Barrier(2))
        try:
            barrier.wait(LINK_S)
        except threading.BrokenBarrierError:
            raise LLMException("LINK_FAILED") from None


class Engine:
    def __init__(self, meeting: Meeting, cluster_id: int) -> None:
        self.cluster_id = cluster_id
        self.comms: dict[int, frozenset[int]] = {}
        self.unlinked: list[int] = []
        self.status = "OK"
        self._meeting = meeting
        self._one_at_a_time = threading.Lock()

    def link(self, name, ranks, table) -> int:
        with self._one_at_a_time:
            self._meeting.wait(name)
            number = len(self.comms) + 1
            self.comms[number] = frozenset(ranks)
            return number

    def unlink(self, comm_id: int) -> None:
        self.unlinked.append(comm_id)

    def query_register_mem_status(self, comm_id: int):
        return SimpleNamespace(name=self.status)


def device(number: int) -> DeviceAddress:
    return DeviceAddress(server_id="10.0.0.1", logical_id=number, physical_id=number, device_ip=f"10.1.0.{number}")


class World:
    """Prefill ranks 0.. and decode ranks 10.., each a process in spirit."""

    def __init__(self, folder, num_prefill: int, num_decode: int) -> None:
        self.meeting = Meeting()
        self.clients = ClientTable(SECRET)
        self.prefill = [Engine(self.meeting, number) for number in range(num_prefill)]
        self.servers = [
            LinkServer(
                engine, MODULE, Way.TWO_SIDED, device(engine.cluster_id), SECRET,
                (str(folder / f"{engine.cluster_id}.sock"), "127.0.0.1", 0),
            )
            for engine in self.prefill
        ]  # fmt: skip
        self.decode = [Engine(self.meeting, 10 + number) for number in range(num_decode)]
        self.linkers = [
            TwoSidedLinker(
                engine, MODULE, Asker(self.clients, Way.TWO_SIDED, engine.cluster_id, device(engine.cluster_id))
            )
            for engine in self.decode
        ]

    def address(self, number: int) -> RankAddress:
        return RankAddress(
            tp_rank=number,
            cluster_id=number,
            host="127.0.0.1",
            port=0,
            device=device(number),
            link_port=self.servers[number].port,
        )

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.clients.close()


@pytest.fixture
def make_world(tmp_path):
    made: list[World] = []

    def make(num_prefill: int, num_decode: int) -> World:
        made.append(World(tmp_path, num_prefill, num_decode))
        return made[-1]

    yield make
    for world in made:
        world.close()


def test_every_rank_links_to_every_other_at_once_without_waiting_in_a_circle(make_world):
    """Each decode rank begins with another prefill rank, and all start together."""
    world = make_world(3, 3)
    failures: list[str] = []
    start = threading.Barrier(9)

    def link(linker: TwoSidedLinker, number: int) -> None:
        start.wait()
        try:
            linker.link(world.address(number), time.monotonic() + 60)
        except LinkFailedError as error:
            failures.append(str(error))

    threads = [
        threading.Thread(target=link, args=(linker, (first + step) % 3))
        for step in range(3)
        for first, linker in enumerate(world.linkers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for engine in world.decode:
        assert set(engine.comms.values()) == {frozenset({engine.cluster_id, number}) for number in range(3)}
    assert [server.num_links for server in world.servers] == [3, 3, 3]


def ask(world: World, link_id: str, reader: int = 10, **change) -> object:
    values = {
        "way": "two_sided",
        "cluster_id": reader,
        "peer_cluster_id": 0,
        "device": device(reader),
        "table_digest": digest(build_pair_table(device(0), device(reader))),
        "deadline_ms": 20_000,
        **change,
    }
    return world.clients.get("127.0.0.1", world.servers[0].port).request(LinkAsk(link_id=link_id, **values), 5.0)


def wait_state(world: World, link_id: str, *states: str, **change):
    until = time.monotonic() + 20
    while (answer := ask(world, link_id, **change)).state not in states:
        assert time.monotonic() < until, answer
        time.sleep(0.01)
    return answer


def test_who_asks_while_another_link_is_made_is_told_to_come_again(make_world):
    world = make_world(1, 0)
    assert ask(world, "a").state == "preparing"
    assert ask(world, "a").state == "preparing", "the same link"
    assert ask(world, "b", 11).state == "busy"
    world.meeting.wait("pd_a")
    assert wait_state(world, "a", "linked").state == "linked"
    assert ask(world, "b", 11).state == "preparing"
    world.meeting.wait("pd_b")


def test_a_reader_that_does_not_come_leaves_the_server_free(make_world, monkeypatch):
    world = make_world(1, 0)
    ask(world, "a")
    assert "LINK_FAILED" in wait_state(world, "a", "failed").detail
    assert ask(world, "b", 11).state == "preparing"
    world.meeting.wait("pd_b")
    assert world.servers[0].problems() == []


def test_memory_that_is_not_exchanged_in_time_fails_and_is_unlinked(make_world):
    world = make_world(1, 0)
    world.prefill[0].status = "PREPARING"
    ask(world, "a", deadline_ms=50)
    world.meeting.wait("pd_a")
    assert "PREPARING at the deadline" in wait_state(world, "a", "failed", deadline_ms=50).detail
    assert world.prefill[0].unlinked == [1]


def test_a_later_process_on_the_same_device_replaces_the_link(make_world):
    world = make_world(1, 0)
    for link_id, cluster_id in (("a", 10), ("b", 30)):
        ask(world, link_id, cluster_id=cluster_id)
        world.meeting.wait(f"pd_{link_id}")
        wait_state(world, link_id, "linked", cluster_id=cluster_id)
    assert world.prefill[0].unlinked == [1]
    assert world.servers[0].num_links == 1
    assert ask(world, "a").state == "ended"


@pytest.mark.parametrize(
    ("server_id", "device_ip", "is_same"),
    [
        ("172.17.0.2", "10.1.0.9", False),
        ("10.0.0.7", "10.1.0.3", True),
        ("10.0.0.1", "", True),
        ("10.0.0.7", "", False),
    ],
)
def test_a_device_is_known_by_its_own_address_where_it_has_one(server_id: str, device_ip: str, is_same: bool):
    first = device(3) if device_ip else msgspec.structs.replace(device(3), device_ip="")
    if server_id == "172.17.0.2":  # two hosts whose containers have one address
        first = msgspec.structs.replace(first, server_id=server_id)
    later = msgspec.structs.replace(device(3), server_id=server_id, device_ip=device_ip)
    common = {"way": "hixl", "peer_cluster_id": 1}
    earlier = LinkAsk(link_id="a", cluster_id=10, device=first, **common)
    assert linkserver._replaces(LinkAsk(link_id="b", cluster_id=30, device=later, **common), earlier) is is_same


def test_a_full_rank_ends_the_oldest_link_for_a_new_one(make_world, monkeypatch):
    """A decode rank that comes back under another address leaves its links; they must not shut everybody out."""
    world = make_world(1, 0)
    monkeypatch.setattr(linkserver, "MAX_LINKS", 2)
    for number, link_id in enumerate("abc"):
        assert ask(world, link_id, 11 + number).state == "preparing"
        world.meeting.wait(f"pd_{link_id}")
        wait_state(world, link_id, "linked")
    assert wait_state(world, "a", "ended").detail == "to make room"
    assert world.prefill[0].unlinked == [1]
    assert world.servers[0].num_links == 2


def test_a_rank_that_prepares_all_it_can_have_refuses_by_count(make_world, monkeypatch):
    world = make_world(1, 0)
    monkeypatch.setattr(linkserver, "MAX_LINKS", 0)
    answer = ask(world, "b", 11)
    assert (answer.code, answer.ours) == ("too_many_links", "0")


@pytest.mark.parametrize("state", ["ending", "ended"])
def test_who_waits_for_a_link_that_the_other_side_ends_is_told_at_once(monkeypatch, state: str):
    asker = Asker(ClientTable(SECRET), Way.TWO_SIDED, 10, device(10))
    answers = SimpleNamespace(request=lambda *_: LinkState(state=state, detail="to make room"))
    monkeypatch.setattr(Asker, "_client", lambda *_: answers)
    peer = RankAddress(tp_rank=0, cluster_id=1, host="127.0.0.1", port=0, link_port=1)
    until = time.monotonic() + 60
    with pytest.raises(LinkFailedError, match=f"{state}: to make room"):
        asker.ask_until(("linked",), asker.make_message(peer, until), peer, until)


def test_an_unexpected_failure_fails_one_link_and_not_the_thread(make_world, monkeypatch):
    world = make_world(1, 0)
    monkeypatch.setattr(world.prefill[0], "link", lambda *_: 1 // 0)
    ask(world, "a")
    assert "ZeroDivisionError" in wait_state(world, "a", "failed").detail
    assert world.servers[0].problems() == []
