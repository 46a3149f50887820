# SPDX-License-Identifier: Apache-2.0
"""The cheap part at the start of `vllm serve --pd-role`: refused with the doctor's words, warned about once, quick."""

from __future__ import annotations

import argparse
import errno
import logging
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.doctor.doctor_process import ROOT
from tests.unit.doctor.hosts import OWN, make_host
from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.doctor import local
from vllm_ascend_pd.doctor.check import State
from vllm_ascend_pd.doctor.checks import memory
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.front.flags import add_pd_arguments
from vllm_ascend_pd.front.serve_args import check_serve_args


def config(role: PDRole = PDRole.PREFILL, listen: tuple[str, int] = (OWN, 0)) -> PDConfig:
    return PDConfig(
        role=role, engine_id="e", epoch="1", runtime_dir="/tmp", listen_host=listen[0], listen_port=listen[1]
    )


def failed(checks: list[Any]) -> list[str]:
    return [check.key for check in checks if check.state is State.FAIL]


def test_a_good_host_starts(tmp_path: Path):
    assert failed(local.check_start(config(), "--host", host=make_host(tmp_path))) == []


def test_a_foreign_address_and_a_taken_port_are_refused(tmp_path: Path):
    host = make_host(tmp_path, taken={8200: errno.EADDRINUSE})
    checks = local.check_start(config(listen=("10.9.9.9", 8200)), "--pd-listen", host=host)
    assert failed(checks) == ["network.address", "network.port"]


def test_a_decode_instance_and_a_node_of_workers_bind_no_port(tmp_path: Path):
    host = make_host(tmp_path, taken={8200: errno.EADDRINUSE})
    assert failed(local.check_start(config(PDRole.DECODE, (OWN, 8200)), "--pd-listen", host=host)) == []
    assert failed(local.check_start(config(listen=(OWN, 8200)), "--pd-listen", binds=False, host=host)) == []


def test_npu_hosts_are_looked_at_without_calling_a_tool(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a tool was called"))
    environ = {"HCCL_NPU_SOCKET_PORT_RANGE": "auto"}
    host = make_host(tmp_path, num_npus=8, environ=environ)
    checks = local.check_start(config(listen=(OWN, 20001)), "--pd-listen", host=host)
    assert set(failed(checks)) >= {"network.npu-ports", "npu.environment"}
    (hccn,) = [check for check in checks if check.key == "npu.hccn-conf"]
    assert hccn.state is State.WARN


def serve_args(words: str, host: str | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_pd_arguments(parser)
    args = parser.parse_args(words.split())
    args.host, args.uds, args.headless, args.grpc = host, None, False, False
    return args


@pytest.fixture(autouse=True)
def _state_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_the_command_ends_with_2_in_the_doctors_words(capsys, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SystemExit) as stop:
            check_serve_args(serve_args(f"--pd-role prefill --pd-listen 127.0.0.1:{port}"))
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert f"vllm serve: error: port: --pd-listen: port {port} on 127.0.0.1 is taken by" in told
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    with pytest.raises(SystemExit):
        check_serve_args(serve_args(f"--pd-role decode --pd-secret-file {secret}", host="198.51.100.77"))
    assert "--host 198.51.100.77 is 198.51.100.77, which is no address of this host" in capsys.readouterr().err


def test_warnings_are_logged_and_the_start_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(memory, "probe_huge_pages", lambda: ("0 of 4 MiB", "MADV_COLLAPSE: Invalid argument"))
    monkeypatch.setattr(memory.check_huge_pages, "__defaults__", (memory.probe_huge_pages,))
    monkeypatch.setattr(logging.getLogger("vllm_ascend_pd"), "propagate", True)
    with caplog.at_level(logging.WARNING, "vllm_ascend_pd"):
        local.refuse_bad_start(config(listen=("127.0.0.1", 0)), "--host")
    assert len([r for r in caplog.records if "huge pages" in r.getMessage()]) == 1
    monkeypatch.setattr(local, "check_start", lambda *_, **__: [local.fail("network.port", "taken", "another")])
    with pytest.raises(PDConfigError, match="port: taken; another"):
        local.refuse_bad_start(config(), "--host")


def test_it_takes_little_time():
    """The best of three: this machine may be busy."""
    taken = []
    for _ in range(3):
        started = time.process_time()
        local.check_start(config(listen=("127.0.0.1", 0)), "--host")
        taken.append(time.process_time() - started)
    assert min(taken) < 0.2


def test_it_imports_neither_torch_nor_vllm():
    code = "import sys, vllm_ascend_pd.doctor.cli; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
