# SPDX-License-Identifier: Apache-2.0
"""The command line: what is refused with 2, by which name; and the report for people."""

from __future__ import annotations

import io

import pytest

from vllm_ascend_pd.doctor.check import Report, State, fail, not_applicable, ok, refuse_failed, warn
from vllm_ascend_pd.doctor.cli import main, read_options
from vllm_ascend_pd.doctor.render import print_report
from vllm_ascend_pd.errors import PDConfigError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--peer p1", "--peer: 'p1' has no port"),
        ("--peer ftp://p1:1", "--peer: 'ftp://p1:1'"),
        ("--peer http://p1", "--peer: 'http://p1' has no port"),
        ("--peer p1:8200", "--peer p1 is not this machine alone: give --pd-secret-file"),
        ("--listen 0.0.0.0", "--listen 0.0.0.0 is not this machine alone: give --pd-secret-file"),
        ("--listen [::1]:x", "--listen: port 'x'"),
        ("--bytes many", "--bytes: 'many' is not a size"),
        ("--bytes 2GiB", "--bytes: 2GiB is above 1024 MiB"),
        ("--timeout soon", "--timeout: 'soon' is not a duration"),
        ("--once", "--once goes with --listen alone"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_names_the_flag(words, message, capsys, monkeypatch):
    monkeypatch.delenv("VLLM_PD_SECRET_FILE", raising=False)
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_flag_ends_with_2():
    with pytest.raises(SystemExit) as stop:
        main(["--per", "x", "y"])
    assert stop.value.code == 2


def test_the_environment_stands_in_for_the_flags_of_serve():
    options = read_options([], {"VLLM_PD_SECRET_FILE": "/s", "VLLM_PD_LISTEN": "10.0.0.1:8200"})
    assert (options.secret_file, options.pd_listen) == ("/s", ("10.0.0.1", 8200))
    options = read_options(["--pd-secret-file", "/t", "--pd-listen", "::1"], {"VLLM_PD_SECRET_FILE": "/s"})
    assert (options.secret_file, options.pd_listen) == ("/t", ("::1", 0))


@pytest.mark.parametrize(
    ("text", "url", "peer"),
    [
        ("http://p1:8100/", "http://p1:8100", None),
        ("10.0.0.2:8200", "", ("10.0.0.2", 8200)),
        ("tcp://10.0.0.2:8200", "", ("10.0.0.2", 8200)),
        ("[fd00::2]:8200", "", ("fd00::2", 8200)),
    ],
)
def test_a_peer_is_an_instance_or_a_doctor(text, url, peer):
    options = read_options(["--peer", text, "--pd-secret-file", "/s"], {})
    assert (options.peer_url, options.peer) == (url, peer)


def test_listening_with_a_peer_is_no_waiting():
    assert read_options(["--listen", "127.0.0.1"], {}).waits
    assert not read_options(["--listen", "127.0.0.1", "--peer", "127.0.0.1:1"], {}).waits


CHECKS = [ok("a.one", "good"), warn("a.two", "so so", "do this"), not_applicable("b.three", "none here")]


def test_only_a_failure_changes_the_exit_code():
    report = Report("here", list(CHECKS))
    assert report.exit_code == 0
    report.add([fail("b.four", "bad", "do that")])
    assert report.exit_code == 1
    assert [report.count(state) for state in State] == [1, 1, 1, 1]


def test_lines_for_people_have_state_check_seen_and_what_to_do():
    stream = io.StringIO()
    print_report(Report("here", [*CHECKS, fail("b.four", "bad", "do that")]), stream)
    assert [line.split("  ")[0].strip() for line in stream.getvalue().splitlines()[:4]] == [
        s.value for s in [*State][:2]
    ] + [
        "not applicable",
        "fail",
    ]
    assert "so so -> do this" in stream.getvalue()
    assert stream.getvalue().splitlines()[-1] == "here: 1 ok, 1 warn, 1 fail, 1 not applicable"


def test_a_start_is_refused_with_all_that_fails():
    refuse_failed(CHECKS)
    with pytest.raises(PDConfigError, match=r"four: bad; do that\n  five: worse; do more"):
        refuse_failed([*CHECKS, fail("b.four", "bad", "do that"), fail("b.five", "worse", "do more")])
