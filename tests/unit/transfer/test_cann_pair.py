# SPDX-License-Identifier: Apache-2.0
"""Our client over the stand-in of CANN's package, prefill in another process: each way to link, and restarts of either.

The stand-in was written from the interface's facts; nothing here ran on an NPU.
"""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec
import pytest

from tests.unit.transfer.cann_rank import SECRET, PrefillProcess, Rank, device
from vllm_ascend_pd import datadist
from vllm_ascend_pd.control.client import ControlClient
from vllm_ascend_pd.datadist.api import Way
from vllm_ascend_pd.datadist.ports import TAKEN_BY_CANN
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.transfer.linking import LinkFailedError
from vllm_ascend_pd.wire import LinkAsk, Refused

WAYS = [Way.HIXL, Way.COMM_RES, Way.TWO_SIDED]


@pytest.fixture
def make_prefill(tmp_path):
    made: list[PrefillProcess] = []

    def make(way: Way, cluster_id: int = 11, physical_id: int = 1) -> PrefillProcess:
        made.append(PrefillProcess(way, cluster_id, physical_id, tmp_path))
        return made[-1]

    yield make
    for process in made:
        process.kill()


@pytest.fixture
def make_decode(tmp_path):
    made: list[Rank] = []

    def make(way: Way, cluster_id: int = 21, physical_id: int = 2) -> Rank:
        if made:
            made.pop().close()
        made.append(Rank(way, cluster_id, physical_id, False, str(tmp_path)))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


def wait_for_links(prefill: PrefillProcess, count: int) -> None:
    deadline = time.monotonic() + 10
    while prefill.ask("links") != count:
        assert time.monotonic() < deadline, prefill.ask("links")
        time.sleep(0.02)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_links_once_and_moves_the_bytes(make_prefill, make_decode, way):
    prefill, decode = make_prefill(way), make_decode(way)
    first = decode.pull(prefill.address, (3, 4, 9), (10, 11, 12))
    assert [decode.holds(11, src, dst) for src, dst in ((3, 10), (4, 11), (9, 12))] == [True] * 3
    assert not decode.holds(11, 3, 13)
    assert decode.pull(prefill.address, (5,), (13,)) == first
    assert prefill.ask("links") == 1


@pytest.mark.parametrize("way", WAYS)
def test_ports_stay_away_from_those_of_canns_transports(make_prefill, way):
    address = make_prefill(way).address
    assert (address.port == 0) is (way is Way.TWO_SIDED), "by rank table nobody dials the engine"
    for port in (address.port, address.link_port):
        assert port not in TAKEN_BY_CANN
        assert port < TAKEN_BY_CANN.start


@pytest.mark.parametrize("way", WAYS)
def test_a_restarted_prefill_rank_is_linked_anew(make_prefill, make_decode, way):
    prefill, decode = make_prefill(way), make_decode(way)
    decode.pull(prefill.address, (3,), (10,))
    prefill.kill()
    again = make_prefill(way, cluster_id=12)  # another process has another id
    decode.links.drop((11,))  # what the scheduler half asks for when the epoch changes
    decode.pull(again.address, (3,), (11,))
    assert decode.holds(12, 3, 11)
    assert decode.links.cluster_ids == [12]


@pytest.mark.parametrize("way", WAYS)
def test_a_restarted_decode_rank_takes_the_place_of_the_one_before_it(make_prefill, make_decode, way):
    """Else the prefill rank would keep a dead link, and its device memory, for every restart."""
    prefill = make_prefill(way)
    make_decode(way, cluster_id=21).pull(prefill.address, (3,), (10,))
    later = make_decode(way, cluster_id=22)
    later.pull(prefill.address, (3,), (10,))
    assert later.holds(11, 3, 10)
    wait_for_links(prefill, 1)


@pytest.mark.parametrize("way", WAYS)
def test_after_a_timeout_the_link_is_dropped_and_made_anew(make_prefill, make_decode, way):
    prefill, decode = make_prefill(way), make_decode(way)
    number = decode.pull(prefill.address, (3,), (10,))
    prefill.freeze()
    with pytest.raises(decode.module.LLMException) as failure:
        decode.pull(prefill.address, (4,), (11,))
    assert failure.value.status_code.name == "LLM_TIMEOUT"
    with pytest.raises(decode.module.LLMException) as failure:
        decode.pull(prefill.address, (4,), (11,))
    assert failure.value.status_code.name == "LLM_NOT_YET_LINK", "the link is spoilt for others too"
    decode.links.drop_spoilt(11, number)
    prefill.thaw()
    assert decode.pull(prefill.address, (4,), (11,)) == number + 1
    assert decode.holds(11, 4, 11)
    wait_for_links(prefill, 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_prefill_rank_that_does_not_answer_fails_the_link_at_its_deadline(make_prefill, make_decode, way):
    prefill, decode = make_prefill(way), make_decode(way)
    prefill.freeze()
    started = time.monotonic()
    with pytest.raises(LinkFailedError, match=r"link: to 127\.0\.0\.1"):
        decode.pull(prefill.address, (3,), (10,), timeout_s=1.0)
    assert time.monotonic() - started < 10


def test_ways_that_differ_are_refused_by_name(make_prefill, make_decode):
    """The handshake refuses them before; this is what a rank says that was not asked."""
    prefill, decode = make_prefill(Way.COMM_RES), make_decode(Way.HIXL)
    with pytest.raises(LinkFailedError, match="way: this prefill rank has comm_res, the decode rank asks with hixl"):
        decode.pull(prefill.address, (3,), (10,))


@pytest.mark.parametrize("way", WAYS)
def test_a_prefill_rank_hears_of_a_link_that_was_dropped(make_prefill, make_decode, way):
    prefill, decode = make_prefill(way), make_decode(way)
    decode.pull(prefill.address, (3,), (10,))
    assert prefill.ask("links") == 1
    decode.links.drop((11,))
    wait_for_links(prefill, 0)


@pytest.fixture
def asking(make_prefill):
    """A prefill process by rank table, and how to ask it."""
    prefill = make_prefill(Way.TWO_SIDED)
    client = ControlClient(f"tcp://127.0.0.1:{prefill.address.link_port}", SECRET)
    good = LinkAsk(link_id="a", way="two_sided", cluster_id=21, peer_cluster_id=11, device=device(2), deadline_ms=500)
    yield lambda **change: client.request(msgspec.structs.replace(good, **change), 5.0)
    client.close()


@pytest.mark.parametrize(
    ("change", "field", "ours", "theirs"),
    [
        ({"way": "hixl"}, "way", "two_sided", "hixl"),
        ({"peer_cluster_id": 12}, "peer_cluster_id", "11", "12"),
        ({"cluster_id": 11}, "cluster_id", "this rank's own", "11"),
        ({"device": None}, "device", None, "None"),
        ({"table_digest": "feed"}, "table_digest", None, "feed"),
    ],
)
def test_a_question_that_does_not_fit_is_refused_with_both_values(asking, change, field, ours, theirs):
    answer = asking(**change)
    assert isinstance(answer, Refused)
    assert (answer.field, answer.theirs) == (field, theirs)
    assert ours is None or answer.ours == ours
    assert answer.ours in answer.message
    assert answer.theirs in answer.message


def test_a_device_that_cannot_be_in_one_table_is_refused(asking):
    a3 = msgspec.structs.replace(device(2), super_device_id="5", super_pod_id="0")
    assert "A2 and A3" in asking(device=a3).message
    assert "twice" in asking(device=device(1)).message


def test_registration_after_the_first_link_is_refused(make_prefill, make_decode):
    prefill, decode = make_prefill(Way.COMM_RES), make_decode(Way.COMM_RES)
    decode.pull(prefill.address, (3,), (10,))
    with pytest.raises(PDConfigError, match="after the first link"):
        decode.engine.cache_manager.register_blocks_cache(decode.cache.cache_desc, decode.addresses)


def test_options_of_every_way_are_accepted(make_decode):
    module = datadist.load("cann")
    settings = datadist.DataPlaneSettings(is_prefill=True, host="127.0.0.1", way=Way.HIXL, sync_timeout_ms=9)
    assert datadist.build_options(module, settings, 18001)["llm.listenIpInfo"] == "127.0.0.1:18001"
    assert "llm.TransferBackend" not in datadist.build_options(module, replace(settings, way=Way.COMM_RES), 5)
    assert datadist.build_options(module, replace(settings, way=Way.TWO_SIDED))["llm.LinkTotalTime"] == "20"
