# SPDX-License-Identifier: Apache-2.0
"""Two real doctors on loopback: a verified transfer both ways, and what they say when something is wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.unit.doctor.doctor_process import ROOT, Doctor
from vllm_ascend_pd.control.client import ControlClient
from vllm_ascend_pd.doctor.check import Check, State
from vllm_ascend_pd.doctor.host import Host
from vllm_ascend_pd.doctor.local import LocalFacts
from vllm_ascend_pd.doctor.peer import visitor
from vllm_ascend_pd.doctor.peer.messages import PROTOCOL, Open, write_body
from vllm_ascend_pd.doctor.peer.visitor import Visit, Visitor
from vllm_ascend_pd.secret import Secret, load_secret
from vllm_ascend_pd.wire import DoctorAsk, DoctorReply, Refused

MIB = 1 << 20


@pytest.fixture
def secret_path(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("a secret of two doctors")
    path.chmod(0o600)
    return path


@pytest.fixture
def doctors(secret_path: Path) -> Iterator[Any]:
    started: list[Doctor] = []

    def start(*more: str, fault: str = "none", environ: dict[str, str] | None = None) -> Doctor:
        doctor = Doctor(
            "--listen", "127.0.0.1", "--pd-secret-file", str(secret_path), *more, fault=fault, environ=environ
        )
        started.append(doctor)
        doctor.wait_listening()
        return doctor

    yield start
    for doctor in started:
        doctor.stop()


def visit(port: int, secret: Secret, **changes: Any) -> dict[str, Check]:
    facts = LocalFacts(Host()).for_peer()
    values = {"host": "127.0.0.1", "port": port, "secret": secret, "facts": facts, "num_bytes": 4 * MIB}
    checks = list(Visitor(Visit(**{**values, "timeout_s": 20.0, **changes})).run())
    return {check.key: check for check in checks}


def test_two_doctors_find_each_other_well_and_move_verified_bytes_both_ways(doctors, secret_path: Path):
    doctor = doctors("--once")
    found = visit(doctor.port, load_secret(secret_path))
    assert {key: str(check) for key, check in found.items() if check.state is not State.OK} == {}
    assert list(found) == [
        "peer.reachable",
        "peer.secret",
        "peer.latency",
        "peer.versions",
        "peer.machine",
        "peer.dial-back",
        "peer.mtu",
        "transfer.from-peer",
        "transfer.to-peer",
    ]
    for key in ("transfer.from-peer", "transfer.to-peer"):
        assert "4 MiB" in found[key].seen
        assert "over mapped" in found[key].seen
        assert "GB/s" in found[key].seen
    assert doctor.end() == 0
    assert [event["event"] for event in doctor.events] == ["visit", "pulled", "done"]
    assert doctor.events[1]["num_bytes"] == 4 * MIB
    assert doctor.events[2] == {"event": "done", "visitor": socket.gethostname(), "ok": True, "summary": "all well"}


def test_it_goes_over_tcp_where_the_instances_would(doctors, secret_path: Path):
    doctor = doctors(environ={"VLLM_PD_HOST_TRANSPORT": "tcp"})
    found = visit(doctor.port, load_secret(secret_path), transport="tcp")
    assert "over tcp" in found["transfer.from-peer"].seen
    assert found["transfer.to-peer"].state is State.OK


def test_a_doctor_serves_one_visitor_after_another(doctors, secret_path: Path):
    doctor = doctors()
    for _ in range(2):
        assert visit(doctor.port, load_secret(secret_path), num_bytes=MIB)["transfer.to-peer"].state is State.OK


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("damage", "1 blocks arrived wrong; first: tensor 3, block 1: 1 of 32768 bytes differ, from byte 17 on"),
        ("misplace", "2 blocks arrived wrong; first: tensor 2, block 0: it holds block 1 of tensor 2"),
        ("empty", "all zero: nothing arrived"),
    ],
)
def test_bytes_that_arrive_wrong_are_found(doctors, secret_path: Path, fault: str, words: str):
    doctor = doctors("--once", fault=fault)
    found = visit(doctor.port, load_secret(secret_path))
    assert found["transfer.from-peer"].state is State.FAIL
    assert words in found["transfer.from-peer"].seen
    assert found["transfer.to-peer"].state is State.OK  # our own source is whole
    assert doctor.end() == 1
    assert doctor.events[-1]["ok"] is False


def test_another_secret_is_refused_and_named(doctors):
    doctor = doctors()
    found = visit(doctor.port, Secret(b"quite another secret"), timeout_s=2.0)
    assert list(found) == ["peer.reachable", "peer.secret"]
    assert found["peer.secret"].state is State.FAIL
    assert "unlike secrets" in found["peer.secret"].seen


def test_a_peer_that_is_away_is_told_from_one_that_is_no_doctor(secret_path: Path):
    secret = load_secret(secret_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = visit(port, secret, timeout_s=2.0)
        assert list(found) == ["peer.reachable"]
        assert "is no doctor" in found["peer.reachable"].seen
        assert f"--peer http://127.0.0.1:{port}" in found["peer.reachable"].todo
    found = visit(port, secret, timeout_s=2.0)
    assert "refused" in found["peer.reachable"].seen
    found = visit(port, secret, host="no-such-host.invalid", timeout_s=2.0)
    assert "does not resolve" in found["peer.reachable"].seen


def test_a_peer_that_cannot_dial_back_fails_and_the_rest_goes_on(doctors, secret_path: Path, monkeypatch):
    """The announced port is another one: as a firewall between would have it."""
    doctor = doctors()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        free = unused.getsockname()[1]

    class Elsewhere(visitor.DoctorListener):
        def start(self) -> int:
            super().start()
            return free

    monkeypatch.setattr(visitor, "DoctorListener", Elsewhere)
    found = visit(doctor.port, load_secret(secret_path), num_bytes=MIB)
    assert found["peer.dial-back"].state is State.FAIL
    assert f"127.0.0.1:{free}" in found["peer.dial-back"].seen
    assert "firewall" in found["peer.dial-back"].todo
    assert found["transfer.to-peer"].state is State.OK


def test_a_doctor_that_dies_on_the_way_ends_the_visit_in_bounded_time(doctors, secret_path: Path, monkeypatch):
    monkeypatch.setattr(visitor, "ANSWER_TIMEOUT_S", 1.0)
    doctor = doctors(fault="die")
    started = time.monotonic()
    found = visit(doctor.port, load_secret(secret_path), num_bytes=MIB)
    assert found["transfer.from-peer"].state is State.OK
    assert found["transfer.to-peer"].state is State.FAIL
    assert "did not pull" in found["transfer.to-peer"].seen
    assert time.monotonic() - started < 30  # and not four times --timeout
    assert doctor.end() == 9


def test_versions_that_differ_are_named_with_both_values(doctors, secret_path: Path):
    doctor = doctors()
    facts = {**LocalFacts(Host()).for_peer(), "vllm_version": "0.23.0+pd.1.ascend"}
    found = visit(doctor.port, load_secret(secret_path), facts=facts, num_bytes=MIB)
    assert found["peer.versions"].state is State.FAIL
    assert "vllm_version is 0.23.0+pd.1.ascend here and " in found["peer.versions"].seen


def test_a_second_visitor_is_told_to_wait_and_a_lost_one_is_forgotten(doctors, secret_path: Path):
    doctor = doctors("--once", fault="impatient")
    secret = load_secret(secret_path)
    client = ControlClient(f"tcp://127.0.0.1:{doctor.port}", secret)
    opening = Open(protocol=PROTOCOL, session="lost", num_bytes=MIB, timeout_ms=4000, facts={"host": "first"})
    try:
        answer = client.request(DoctorAsk(verb="open", body=write_body(opening)), 20.0)
        assert isinstance(answer, DoctorReply)
        again = client.request(DoctorAsk(verb="open", body=write_body(opening)), 20.0)
        assert again == answer  # the same question, the same answer
        found = visit(doctor.port, secret, timeout_s=5.0)
        assert "busy with a doctor on first" in found["peer.session"].seen
        old = Open(protocol=PROTOCOL + 1, session="old", num_bytes=MIB, timeout_ms=1000, facts={})
        refused = client.request(DoctorAsk(verb="open", body=write_body(old)), 5.0)
        assert isinstance(refused, Refused)
        assert f"{PROTOCOL} here, {PROTOCOL + 1} there" in refused.message
    finally:
        client.close()
    assert doctor.end() == 1
    assert doctor.events[-1]["summary"] == "the visitor has gone without a word"


def test_nothing_is_left_of_a_visit(doctors, secret_path: Path):
    doctor = doctors()
    visit(doctor.port, load_secret(secret_path), num_bytes=MIB)
    first = _open_files(doctor)
    for _ in range(3):
        visit(doctor.port, load_secret(secret_path), num_bytes=MIB)
    deadline = time.monotonic() + 5
    while (last := _open_files(doctor)) > first and time.monotonic() < deadline:
        time.sleep(0.05)  # sockets of the last visit close
    assert last <= first
    assert last["memfd"] == 0


def _open_files(doctor: Doctor) -> Counter[str]:
    """Of that process, by kind."""
    found: Counter[str] = Counter(memfd=0)
    for entry in Path(f"/proc/{doctor.process.pid}/fd").iterdir():
        with suppress(OSError):
            found["memfd" if "memfd" in os.readlink(entry) else "other"] += 1
    return found


# ---------------------------------------------------------------- the command


def run_doctor(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    code = "import sys; from vllm_ascend_pd.doctor.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_the_command_ends_with_0_or_1_and_its_document_has_the_stable_keys(doctors, secret_path: Path):
    doctor = doctors("--once")
    words = ("--peer", f"127.0.0.1:{doctor.port}", "--pd-secret-file", str(secret_path), "--bytes", "1MiB", "--json")
    good = run_doctor(*words)
    assert good.returncode == 0, good
    document = json.loads(good.stdout)
    assert set(document) == {"format", "about", "exit_code", "counts", "checks"}
    assert document["format"] == 1
    assert document["exit_code"] == 0
    assert set(document["counts"]) == {"ok", "warn", "fail", "not applicable"}
    assert sum(document["counts"].values()) == len(document["checks"])
    for check in document["checks"]:
        assert set(check) == {"check", "status", "seen", "todo"}
    keys = [check["check"] for check in document["checks"]]
    assert len(set(keys)) == len(keys)
    assert {"software.vllm", "memory.arena", "network.address", "peer.dial-back", "transfer.to-peer"} <= set(keys)
    assert doctor.end() == 0
    away = run_doctor(*words)
    assert away.returncode == 1
    assert json.loads(away.stdout)["exit_code"] == 1


def test_people_get_one_line_for_each_check_and_a_sum():
    found = run_doctor()
    lines = found.stdout.splitlines()
    assert found.returncode == 0, found
    assert lines[0].startswith("ok ")
    assert any("memory.huge-pages" in line for line in lines)
    assert lines[-1].startswith(socket.gethostname())
    assert len(lines) > 10


def test_a_listening_doctor_whose_port_is_taken_says_so_and_ends(secret_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = run_doctor("--listen", f"127.0.0.1:{port}", "--pd-secret-file", str(secret_path))
    assert found.returncode == 1
    assert f"--listen: port {port} on 127.0.0.1 is taken by" in found.stdout


def test_a_doctor_that_nobody_visits_ends_in_time(secret_path: Path):
    found = run_doctor("--listen", "127.0.0.1", "--pd-secret-file", str(secret_path), "--once", "--listen-for", "1s")
    assert found.returncode == 1
    found = run_doctor("--listen", "127.0.0.1", "--pd-secret-file", str(secret_path), "--listen-for", "1s")
    assert found.returncode == 0


def test_a_doctor_is_recognised_also_when_it_was_called_by_a_url(doctors, secret_path: Path):
    doctor = doctors("--once")
    words = ("--peer", f"http://127.0.0.1:{doctor.port}", "--pd-secret-file", str(secret_path), "--bytes", "1MiB")
    found = run_doctor(*words)
    assert found.returncode == 0, found
    assert "transfer.to-peer" in found.stdout
