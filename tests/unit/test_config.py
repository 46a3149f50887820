# SPDX-License-Identifier: Apache-2.0
"""Flags, variables and single values: every wrong input gets a sentence with the name and the values."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_ascend_pd import config
from vllm_ascend_pd.config import PDConfig, PDRole, parse_duration, parse_listen, parse_prefill_url
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.front.flags import OPTIONS, VARIABLES, add_pd_arguments, read_options
from vllm_ascend_pd.front.resolve import build_config

INSTANCE = {"engine_id": "pd-1", "epoch": "e1", "runtime_dir": "/run/pd"}


def parse(*words: str, env: dict[str, str] | None = None) -> PDConfig | None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_pd_arguments(parser)
    given = read_options(parser.parse_args(" ".join(words).split()), env or {})
    return build_config(given, INSTANCE) if "role" in given else None


def test_no_flag_means_no_pd() -> None:
    assert parse() is None


def test_defaults_of_a_decode_instance() -> None:
    found = parse("--pd-role", "decode", "--pd-prefill", "http://p:8100")
    assert found == PDConfig(role=PDRole.DECODE, prefill_urls=("http://p:8100",), **INSTANCE)
    assert (found.lease_s, found.deadline_s, found.start_timeout_s) == (30, 60, 600)
    assert (found.load_failure, found.verify, found.transfer) == ("reprefill", "off", "auto")


def test_decode_without_prefill_urls_is_for_routers() -> None:
    found = parse("--pd-role", "decode")
    assert found is not None
    assert found.prefill_urls == ()


def test_every_flag_reaches_its_field() -> None:
    found = parse(
        "--pd-role decode --pd-prefill http://a:1 https://b --pd-listen 127.0.0.1:9 --pd-load-failure fail",
        "--pd-require-remote-kv --pd-lease 2m --pd-deadline 500ms --pd-start-timeout 7 --pd-transfer staged",
        "--pd-host-transport tcp --pd-verify off --pd-secret-file /s",
    )
    assert found is not None
    assert found.prefill_urls == ("http://a:1", "https://b")
    assert (found.listen_host, found.listen_port) == ("127.0.0.1", 9)
    assert (found.load_failure, found.require_remote_kv, found.transfer) == ("fail", True, "staged")
    assert (found.lease_s, found.deadline_s, found.start_timeout_s) == (120, 0.5, 7)
    assert (found.host_transport, found.verify, found.secret_file) == ("tcp", "off", "/s")


def test_every_flag_has_an_environment_twin() -> None:
    env = {
        "VLLM_PD_ROLE": "decode",
        "VLLM_PD_PREFILL": "http://a:1, http://b:2",
        "VLLM_PD_LISTEN": "[::1]:9",
        "VLLM_PD_LOAD_FAILURE": "recompute",
        "VLLM_PD_REQUIRE_REMOTE_KV": "1",
        "VLLM_PD_LEASE": "5s",
        "VLLM_PD_DEADLINE": "6",
        "VLLM_PD_START_TIMEOUT": "7",
        "VLLM_PD_HOST_TRANSPORT": "mapped",
    }
    found = parse(env=env)
    assert found is not None
    assert found.prefill_urls == ("http://a:1", "http://b:2")
    assert (found.listen_host, found.listen_port) == ("::1", 9)
    assert (found.lease_s, found.deadline_s, found.start_timeout_s) == (5, 6, 7)
    assert (found.require_remote_kv, found.host_transport, found.load_failure) == (True, "mapped", "recompute")
    assert {option.variable for option in OPTIONS} == set(VARIABLES)


def test_the_flag_wins_over_its_variable() -> None:
    found = parse("--pd-role", "prefill", "--pd-lease", "9", env={"VLLM_PD_LEASE": "5", "VLLM_PD_ROLE": "decode"})
    assert found is not None
    assert (found.role, found.lease_s) == (PDRole.PREFILL, 9)


def test_a_switch_in_the_environment_can_be_turned_off_by_flag() -> None:
    found = parse("--pd-role", "decode", "--no-pd-require-remote-kv", env={"VLLM_PD_REQUIRE_REMOTE_KV": "1"})
    assert found is not None
    assert not found.require_remote_kv


WRONG = [
    ("--pd-prefill http://a:1", {}, ["--pd-prefill", "http://a:1", "--pd-role decode"]),
    ("--pd-prefill http://a:1 --pd-role prefill", {}, ["--pd-prefill", "http://a:1", "decode", "--pd-role is prefill"]),
    ("--pd-lease 5", {}, ["--pd-lease", "5", "--pd-role"]),
    ("--pd-role prefill --pd-load-failure fail", {}, ["--pd-load-failure", "fail", "prefill"]),
    ("", {"VLLM_PD_LEASE": "5"}, ["VLLM_PD_LEASE", "--pd-role"]),
    ("", {"VLLM_PD_ROLE": "prefil"}, ["VLLM_PD_ROLE", "prefil", "'prefill'"]),
    ("--pd-role decode --pd-prefill p1:8100", {}, ["--pd-prefill", "'http://p1:8100'"]),
    ("--pd-role decode --pd-prefill http://p1", {}, ["--pd-prefill", "http://p1", "8000"]),
    ("--pd-role decode --pd-prefill tcp://p1:1", {}, ["--pd-prefill", "'tcp'", "dns+http"]),
    ("--pd-role decode --pd-prefill http://p1:99999", {}, ["--pd-prefill", "http://p1:99999"]),
    ("--pd-role decode --pd-prefill http://:8100", {}, ["--pd-prefill", "no host"]),
    ("--pd-role decode --pd-prefill http://::1:8100", {}, ["--pd-prefill", "http://::1:8100"]),
    ("--pd-role decode --pd-prefill http://u:p@h:1", {}, ["--pd-prefill", "nothing else"]),
    ("--pd-role decode --pd-prefill http://a:1 http://a:1/", {}, ["--pd-prefill", "http://a:1", "twice"]),
    ("--pd-role decode --pd-prefill http://a:1 --pd-prefill http://a:1", {}, ["--pd-prefill", "twice"]),
    ("--pd-role prefill --pd-listen 0.0.0.0", {}, ["--pd-listen", "0.0.0.0", "--pd-secret-file"]),
    ("--pd-role prefill", {"VLLM_PD_LISTEN": "10.0.0.1:5"}, ["VLLM_PD_LISTEN", "10.0.0.1", "--pd-secret-file"]),
    ("--pd-role prefill --pd-listen 127.0.0.1:0", {}, ["--pd-listen", "'0'", "65535"]),
    ("--pd-role prefill --pd-listen 127.0.0.1:70000", {}, ["--pd-listen", "70000", "65535"]),
    ("--pd-role prefill --pd-listen 127.0.0.1:x", {}, ["--pd-listen", "'x'"]),
    ("--pd-role prefill --pd-listen :8200", {}, ["--pd-listen", "no host"]),
    ("--pd-role prefill --pd-listen *:8200", {}, ["--pd-listen", "0.0.0.0"]),
    ("--pd-role prefill --pd-listen 1.2.3.400", {}, ["--pd-listen", "1.2.3.400"]),
    ("--pd-role prefill --pd-lease -5", {}, ["--pd-lease", "-5", "negative"]),
    ("--pd-role prefill --pd-lease 0", {}, ["--pd-lease", "1s"]),
    ("--pd-role prefill --pd-lease 5h", {}, ["--pd-lease", "5h", "500ms"]),
    ("--pd-role prefill --pd-lease 9999999", {}, ["--pd-lease", "9999999", "86400"]),
    ("--pd-role prefill --pd-verify checksum", {}, ["--pd-verify", "checksum", "off"]),
    ("--pd-role prefill --pd-rank-table /x.json", {}, ["--pd-rank-table", "/x.json", "no file"]),
    ("--pd-role decode", {"VLLM_PD_REQUIRE_REMOTE_KV": "maybe"}, ["VLLM_PD_REQUIRE_REMOTE_KV", "maybe"]),
    ("--pd-role decode", {"VLLM_PD_PREFILL": " , "}, ["VLLM_PD_PREFILL", "empty"]),
]


@pytest.mark.parametrize(("words", "env", "parts"), WRONG, ids=[f"{w}{e or ''}" for w, e, _ in WRONG])
def test_wrong_input_is_refused_by_name_and_value(words: str, env: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(PDConfigError) as caught:
        parse(*words.split(), env=env)
    for part in parts:
        assert part in str(caught.value)


def test_a_misspelt_variable_is_an_error_with_the_nearest_name() -> None:
    """F69: a misspelt key is never ignored."""
    with pytest.raises(PDConfigError, match=r"VLLM_PD_PREFIL: .*'VLLM_PD_PREFILL'"):
        parse(env={"VLLM_PD_PREFIL": "http://a:1"})


def test_variables_of_the_build_and_of_others_are_left_alone() -> None:
    assert parse(env={"VLLM_PD_CACHE": "/c", "VLLM_LOGGING_LEVEL": "INFO"}) is None


def test_a_rank_table_is_carried_by_its_path(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text("{}")
    config = parse("--pd-role", "prefill", "--pd-rank-table", str(table))
    assert config is not None
    assert config.rank_table == str(table)


def test_a_config_survives_its_journey_as_a_dict() -> None:
    before = parse("--pd-role", "decode", "--pd-prefill", "http://[::1]:8100")
    assert before is not None
    assert PDConfig.from_dict(before.to_dict()) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lease": 3}, "'lease'; did you mean 'lease_s'"),
        ({"role": "both"}, "'both' is not one of prefill, decode"),
        ({"engine_id": None}, "missing key 'engine_id'"),
    ],
)
def test_a_dict_with_a_wrong_key_is_refused(change: dict[str, object], message: str) -> None:
    """F69: also between our own processes."""
    values = PDConfig(role=PDRole.PREFILL, **INSTANCE).to_dict() | change
    values = {key: value for key, value in values.items() if value is not None}
    with pytest.raises(PDConfigError, match=message):
        PDConfig.from_dict(values)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("30s", 30), ("500ms", 0.5), ("2m", 120), (1.5, 1.5), ("0.25 m", 15)]
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text, "--x") == seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1", ("127.0.0.1", 0)),
        ("127.0.0.1:9", ("127.0.0.1", 9)),
        ("[::1]:9", ("::1", 9)),
        ("[::1]", ("::1", 0)),
        ("::1", ("::1", 0)),
        ("localhost:9", ("localhost", 9)),
    ],
)
def test_listen_addresses(text: str, expected: tuple[str, int]) -> None:
    """F71: IPv6 literals work with and without a port."""
    assert parse_listen(text, "--x") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://[::1]:8100", "http://[::1]:8100"),
        ("HTTP://P1:8100/", "http://p1:8100"),
        ("https://gateway/p1/", "https://gateway/p1"),
        ("dns+http://prefill.svc:8100", "dns+http://prefill.svc:8100"),
    ],
)
def test_urls_are_normalised(text: str, expected: str) -> None:
    """F71: IPv6 literals keep their brackets."""
    assert parse_prefill_url(text, "--x") == expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_what_counts_as_loopback(host: str, expected: bool) -> None:
    assert config.is_loopback(host) is expected


def test_peers_are_never_told_a_wildcard_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "10.1.2.3")
    listening = PDConfig(role=PDRole.PREFILL, listen_host="0.0.0.0", **INSTANCE)
    assert listening.advertise_host == "10.1.2.3"
    assert dataclasses.replace(listening, listen_host="::1").advertise_host == "::1"


def test_modules_that_edits_import_do_not_import_vllm() -> None:
    """An edit of vLLM imports them while vLLM itself is being imported."""
    code = (
        "import sys\n"
        "import vllm_ascend_pd.front.flags, vllm_ascend_pd.front.resolve, vllm_ascend_pd.front.hooks\n"
        "import vllm_ascend_pd.front.engine_errors, vllm_ascend_pd.front.serve_args\n"
        "heavy = {'vllm', 'torch', 'httpx', 'fastapi', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_config_of_a_vllm_config_is_found_wherever_the_connector_stands() -> None:
    values = PDConfig(role=PDRole.PREFILL, **INSTANCE).to_dict()
    transfer = SimpleNamespace(kv_connector_extra_config={"pd": values, "connectors": []})
    found = config.pd_config_of(SimpleNamespace(kv_transfer_config=transfer))
    assert found == PDConfig(role=PDRole.PREFILL, **INSTANCE)
    assert config.pd_config_of(SimpleNamespace(kv_transfer_config=None)) is None
