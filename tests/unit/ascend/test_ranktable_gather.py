# SPDX-License-Identifier: Apache-2.0
"""Several hosts make one table: processes that meet on loopback, and what the collector declines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.unit.ascend.tables import address
from vllm_ascend_pd.ascend.ranktable import gather
from vllm_ascend_pd.ascend.ranktable.gather import PROTOCOL, Collector, Offer, make_offer, send_offer
from vllm_ascend_pd.control.endpoint import set_client_curve
from vllm_ascend_pd.errors import PDAuthError, PDConfigError, PDUnreachableError
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.wire import DeviceAddress

ROOT = Path(__file__).parents[3]
SECRET = Secret(b"a secret for this test only", from_file=True)
OTHER_SECRET = Secret(b"another secret of equal length", from_file=True)


def quiet(text: str) -> None:
    """Progress that nobody reads."""


# ---------------------------------------------------------------- processes


class Host:
    """`vllm pd ranktable generate` on a recorded machine."""

    def __init__(self, tmp_path: Path, recording: str, secret: bytes, *arguments: str) -> None:
        home = tmp_path / recording
        home.mkdir()
        secret_file = home / "secret"
        secret_file.write_bytes(secret)
        secret_file.chmod(0o600)
        self.output = home / "table.json"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.ascend.run_on", recording, str(home / "root"), "generate", *arguments]
            + ["--pd-secret-file", str(secret_file), "--output", str(self.output)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def read_port(self) -> int:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if match := re.search(r"--send-to <this host>:(\d+)", line):
                return int(match[1])
        raise AssertionError("the collector did not say where it listens")

    def end(self) -> tuple[int, str]:
        _, text = self.process.communicate(timeout=60)
        return self.process.returncode, text


def test_two_hosts_get_the_same_table(tmp_path):
    wanted = ("--collect", "127.0.0.1:0", "--hosts", "2", "--prefill", "2", "--timeout", "60")
    first = Host(tmp_path, "a3-host", b"x" * 32, *wanted)
    port = first.read_port()
    second = Host(tmp_path, "a3-host-other-pod", b"x" * 32, "--decode", "2", "--send-to", f"127.0.0.1:{port}")
    code, said = second.end()
    assert code == 0, said
    code, told = first.end()
    assert code == 0, told
    assert "2/2 " in told
    assert "not confirmed" not in told
    assert f"wrote {second.output}" in said
    assert first.output.read_text() == second.output.read_text()
    table = json.loads(first.output.read_text())
    assert [(e["server_id"], e["cluster_id"], e["super_pod_id"]) for e in table["prefill_device_list"]] == [
        ("198.51.100.21", "1", "0"),
        ("198.51.100.21", "2", "0"),
    ]
    assert [(e["server_id"], e["cluster_id"], e["super_pod_id"]) for e in table["decode_device_list"]] == [
        ("198.51.100.23", "3", "1"),
        ("198.51.100.23", "4", "1"),
    ]


def test_a_host_with_another_secret_is_refused_at_once_and_told_why(tmp_path):
    wanted = ("--collect", "127.0.0.1:0", "--hosts", "2", "--prefill", "2", "--timeout", "6")
    first = Host(tmp_path, "a3-host", b"x" * 32, *wanted)
    port = first.read_port()
    stranger = Host(
        tmp_path, "a3-host-second", b"y" * 32, "--decode", "2", "--send-to", f"127.0.0.1:{port}", "--timeout", "120"
    )
    code, said = stranger.end()
    assert code == 1
    assert "refuses this host's key: give the same --pd-secret-file on all hosts" in said
    assert not stranger.output.exists()
    code, told = first.end()
    assert code == 1
    assert "after 6 s 1 of 2 hosts are here" in told
    assert not first.output.exists()


# ---------------------------------------------------------------- threads


def start(num_hosts, own=None, secret=SECRET):
    own = own or make_offer([address(1, 0)], [], [])
    return Collector("127.0.0.1", 0, secret, own, num_hosts, quiet)


def in_thread(action):
    """Run `action` elsewhere; the list gets its result or exception."""
    results = []

    def work():
        try:
            results.append(action())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, results


def send(collector, offer, secret=SECRET, timeout_s=20.0):
    return in_thread(lambda: send_offer("127.0.0.1", collector.port, secret, offer, timeout_s, quiet))


def test_offers_come_in_the_order_of_server_ids_after_the_own():
    with start(6, own=make_offer([address(9, 0)], [], [])) as collector:
        senders = [send(collector, make_offer([address(server, 0)], [], [])) for server in (4, 2, 5, 1, 3)]
        offers = collector.collect(20)
        collector.hand_out("the table")
        for thread, results in senders:
            thread.join(10)
            assert results == ["the table"]
    assert [offer.server_id for offer in offers] == [f"198.51.100.{server}" for server in (9, 1, 2, 3, 4, 5)]


def test_a_host_that_does_not_confirm_is_named(monkeypatch):
    monkeypatch.setattr(gather, "GRACE_S", 1.0)
    said = []
    with Collector("127.0.0.1", 0, SECRET, make_offer([address(1, 0)], [], []), 2, said.append) as collector:
        thread, results = send(collector, make_offer([address(2, 0)], [], []), timeout_s=0.7)
        collector.collect(20)
        thread.join(10)  # gone before the table is there
        collector.hand_out("t")
    assert isinstance(results[0], PDUnreachableError)
    assert "1 of 2 hosts" in str(results[0]) or "2 of 2 hosts" in str(results[0])
    assert "has not confirmed the table; copy the file there" in said[-1]


def device(**changes):
    values = {"server_id": "h", "logical_id": 0, "physical_id": 0, "device_ip": "192.0.2.1"}
    return DeviceAddress(**{**values, **changes})


DECLINED = [
    (make_offer([address(1, 3)], [], []), "has the server id 198.51.100.1 too; give each host its own: --server-id"),
    (make_offer([], [], []), "it offers 0 devices; 1 to 64 are taken"),
    (make_offer([device(physical_id=n) for n in range(65)], [], []), "it offers 65 devices"),
    (make_offer([device()], [device(server_id="i")], []), "its devices do not have one server id"),
    (make_offer([device(device_ip="1" * 300)], [], []), "a text has more than 256 characters"),
    (Offer(protocol=2, sender="s", host_name="h", others=(device(),)), "it speaks protocol 2, the collector 1"),
]


@pytest.mark.parametrize(("offer", "reason"), DECLINED)
def test_an_offer_that_does_not_fit_is_declined_with_the_reason(offer, reason):
    with start(2) as collector:
        thread, results = send(collector, offer)
        with pytest.raises(PDUnreachableError, match="1 of 2 hosts are here"):
            collector.collect(1.0)
        thread.join(10)
    assert isinstance(results[0], PDConfigError)
    assert reason in str(results[0])


def test_one_host_too_many_is_declined(monkeypatch):
    monkeypatch.setattr(gather, "GRACE_S", 3.0)
    with start(2) as collector:
        first, results = send(collector, make_offer([address(2, 0)], [], []))
        collector.collect(20)
        collector.hand_out("t")
        first.join(10)
        late, late_results = send(collector, make_offer([address(3, 0)], [], []))
        collector.hand_out("t")  # serves on: the first one is gone
        late.join(10)
    assert results == ["t"]
    assert "2 hosts are complete without it" in str(late_results[0])


def test_a_table_that_cannot_be_made_is_told_to_the_senders():
    with start(2) as collector:
        thread, results = send(collector, make_offer([address(2, 0)], [], []))
        collector.collect(20)
        collector.decline("no table could be made: A2 and A3")
        thread.join(10)
    assert "no table could be made: A2 and A3" in str(results[0])


def test_a_sender_without_collector_is_told_what_to_check():
    with start(2) as collector:
        port = collector.port
    with pytest.raises(PDUnreachableError, match=r"gave no table within 1 s: no connection"):
        send_offer("127.0.0.1", port, SECRET, make_offer([address(2, 0)], [], []), 1.0, quiet)


def test_another_secret_is_recognised():
    with start(2) as collector:
        thread, results = send(collector, make_offer([address(2, 0)], [], []), secret=OTHER_SECRET, timeout_s=60)
        with pytest.raises(PDUnreachableError):
            collector.collect(4)
        thread.join(10)
    assert isinstance(results[0], PDAuthError)


def test_an_offer_sent_again_is_one_host():
    offer = make_offer([address(2, 0)], [], [])
    with start(3) as collector:
        senders = [send(collector, offer, timeout_s=1.0), send(collector, offer, timeout_s=1.0)]
        with pytest.raises(PDUnreachableError, match="2 of 3 hosts"):
            collector.collect(1.5)
        for thread, _ in senders:
            thread.join(10)


@pytest.mark.parametrize(
    "frames", [[b""], [b"\xff" * 100], [b"a", b"b", b"c"], [msgspec.msgpack.encode({"type": "offer"})]]
)
def test_frames_that_are_no_offers_do_no_harm(frames):
    with start(2) as collector:
        context = zmq.Context()
        sock = context.socket(zmq.DEALER)
        set_client_curve(sock, SECRET)
        sock.connect(f"tcp://127.0.0.1:{collector.port}")
        sock.send_multipart(frames)
        thread, results = send(collector, make_offer([address(2, 0)], [], []))
        assert len(collector.collect(20)) == 2
        collector.hand_out("t")
        thread.join(10)
        context.destroy(0)
    assert results == ["t"]
    assert PROTOCOL == 1
