# SPDX-License-Identifier: Apache-2.0
"""`vllm pd ranktable` on recorded machines: what is printed, written, and which exit code."""

from __future__ import annotations

import json

import pytest

from tests.unit.ascend.replay import replay
from tests.unit.ascend.tables import address
from vllm_ascend_pd.ascend.ranktable import from_devices, read_table, write_table
from vllm_ascend_pd.ascend.ranktable.cli import main
from vllm_ascend_pd.up.cli import main as pd_main


def run(tmp_path, recording, *arguments):
    return main([str(argument) for argument in arguments], replay(recording, tmp_path / f"root-{recording}"))


def test_generate_writes_a_pair_table_of_all_visible_devices(tmp_path, capsys):
    assert run(tmp_path, "a2-container", "generate") == 0
    table = read_table(capsys.readouterr().out)
    assert [(device.device_id, device.rank_id) for _, _, device in table.rows()] == [("4", "0"), ("7", "1")]


def test_generate_gives_roles_in_logical_order_and_says_what_is_left_out(tmp_path, capsys):
    output = tmp_path / "table.json"
    assert run(tmp_path, "a3-host", "generate", "--prefill", 8, "--decode", 4, "--output", output) == 0
    table = read_table(output.read_text())
    assert table.format == "roles"
    assert [sum(len(server.devices) for server in group.servers) for group in table.groups] == [8, 4]
    said = capsys.readouterr()
    assert said.out == ""
    assert "4 devices have no role and are left out: NPU 12, 13, 14, 15" in said.err
    assert output.stat().st_mode & 0o777 == 0o644
    assert run(tmp_path, "a3-host", "check", output) == 0


def test_generate_takes_the_named_devices_in_their_order(tmp_path, capsys):
    assert run(tmp_path, "a2-host", "generate", "--devices", "5,2", "--server-id", "left") == 0
    table = read_table(capsys.readouterr().out)
    assert [(s.server_id, d.device_id, d.rank_id) for _, s, d in table.rows()] == [
        ("left", "5", "0"),
        ("left", "2", "1"),
    ]


def test_generate_makes_a_groups_table(tmp_path, capsys):
    wanted = ("--format", "groups", "--prefill", 1, "--decode", 1, "--router", "203.0.113.9")
    assert run(tmp_path, "a2-host", "generate", *wanted) == 0
    table = read_table(capsys.readouterr().out)
    assert [(group.title, group.servers[0].server_id) for group in table.groups] == [
        ("router", "203.0.113.9"),
        ("prefill", "198.51.100.11"),
        ("decode", "198.51.100.11"),
    ]


def test_generate_warns_of_a_sick_chip_and_writes_all_the_same(tmp_path, capsys):
    assert run(tmp_path, "a2-alarm", "generate") == 0
    said = capsys.readouterr()
    assert "NPU 1 is Alarm error code 80E01801" in said.err
    assert len(list(read_table(said.out).rows())) == 2


def test_a_table_that_was_there_is_replaced_whole(tmp_path):
    output = tmp_path / "table.json"
    output.write_text("stale")
    assert run(tmp_path, "a2-host", "generate", "--output", output) == 0
    assert read_table(output.read_text()).format == "pair"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("recording", "arguments", "message"),
    [
        ("a2-host", ("--prefill", 8, "--decode", 1), "need 9 devices, this host has 8"),
        ("a2-host", ("--prefill", 2), "needs devices of both roles, and no host gave --decode"),
        ("a2-host", ("--format", "roles"), "host 198.51.100.11 gave its devices no role; give --prefill or --decode"),
        ("a2-host", ("--devices", "9"), "no NPU with logical id 9"),
        ("a2-host", ("--router", "x"), "--router belongs to --format groups"),
        ("a2-host", ("--collect", "127.0.0.1:1"), "--collect HOST:PORT and --hosts N belong together"),
        ("a2-host", ("--hosts", 2), "--collect HOST:PORT and --hosts N belong together"),
        ("a2-host", ("--collect", "h:1", "--hosts", 1), "--hosts 1: 2 to 1024"),
        ("a2-host", ("--collect", "h:1", "--hosts", 2, "--send-to", "h:1"), "exclude each other"),
        ("a2-host", ("--send-to", "h:0"), "--send-to needs the port"),
        ("a2-host", ("--send-to", "h:1", "--format", "pair"), "are for the collecting host"),
        ("a2-host", ("--timeout", "nan"), "--timeout nan: give 1 to 86400 seconds"),
        ("a2-host", ("--send-to", "192.0.2.200:9", "--timeout", 1), "give the same --pd-secret-file on all hosts"),
        (
            "a2-host",
            ("--collect", "0.0.0.0:0", "--hosts", 2, "--timeout", 1),
            "give the same --pd-secret-file on all hosts",
        ),
        ("a2-host", ("--output", "/no/such/place/t.json"), "cannot be written: No such file or directory"),
        ("a2-no-address", (), "no IP address is configured"),
        ("no-npu", (), "there is no NPU here"),
    ],
)
def test_generate_refuses_what_cannot_be_with_a_sentence(recording, arguments, message, tmp_path, capsys):
    assert run(tmp_path, recording, "generate", *arguments) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.strip().splitlines()[-1].startswith("vllm pd ranktable generate: ")


@pytest.mark.parametrize("words", [("--prefill", "0"), ("--devices", "1,1"), ("--collect", "x"), ("--hosts", "99999")])
def test_a_wrong_command_line_is_exit_code_2(words, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, "a2-host", "generate", *words)
    assert ended.value.code == 2
    assert words[1] in capsys.readouterr().err


def test_devices_without_address_are_written_when_links_stay_within_the_server(tmp_path, capsys):
    assert run(tmp_path, "a2-no-address", "generate", "--without-ip") == 0
    said = capsys.readouterr()
    assert "device_ip" not in said.out
    assert said.err == ""


def file_of(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    return path


def test_check_prints_every_problem_with_file_and_line(tmp_path, capsys):
    text = write_table(from_devices([address(1, 0), address(2, 0)]))
    text = text.replace('"192.0.1.1"', '"nowhere"').replace('"rank_id": "1"', '"rank_id": "0"')
    path = file_of(tmp_path, text)
    assert run(tmp_path, "a2-host", "check", path, "--offline") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{path}:11: fail: server_list[0].device[0].device_ip: is 'nowhere'; write ")
    assert lines[1].startswith(
        f"{path}:22: fail: server_list[1].device[0].rank_id: '0' is there twice (also on line 12)"
    )
    assert lines[2] == "pair table, version 1.0: 2 devices on 2 servers: 2 failures, 0 warnings"


def test_check_compares_with_this_host(tmp_path, capsys):
    path = file_of(tmp_path, write_table(from_devices([address(1, 0), address(2, 0)])))
    assert run(tmp_path, "a2-host", "check", path) == 1
    assert "no server of the table is this host" in capsys.readouterr().out
    assert run(tmp_path, "a2-host", "check", path, "--server-id", "198.51.100.2") == 1
    assert "the driver says 192.0.2.10" in capsys.readouterr().out
    assert run(tmp_path, "no-npu", "check", path) == 0
    assert "not compared with this host: there is no NPU here" in capsys.readouterr().out


def test_check_gives_json(tmp_path, capsys):
    path = file_of(tmp_path, "{\n}")
    assert run(tmp_path, "a2-host", "check", path, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [(problem["level"], problem["line"]) for problem in report["problems"]] == [("fail", 1)]


def test_warnings_alone_are_no_failure(tmp_path, capsys):
    path = file_of(tmp_path, write_table(from_devices([address(1, 0), address(2, 0)])).replace('"0"', "0"))
    assert run(tmp_path, "a2-host", "check", path, "--offline") == 0
    assert "warn: " in capsys.readouterr().out


def test_show_prints_all_devices_uncut(tmp_path, capsys):
    devices = [address(number // 8, number % 8, a3=True) for number in range(1000)]
    path = file_of(tmp_path, write_table(from_devices(devices)))
    assert run(tmp_path, "no-npu", "show", path) == 0
    out = capsys.readouterr().out
    assert "1000 devices on 125 servers" in out
    assert all(f" {device.device_ip} " in out for device in devices)
    assert "…" not in out


def test_show_gives_json(tmp_path, capsys):
    path = file_of(tmp_path, write_table(from_devices([address(1, 0), address(2, 0)])))
    assert run(tmp_path, "no-npu", "show", path, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [device["server_id"] for device in report["devices"]] == ["198.51.100.1", "198.51.100.2"]


def test_show_points_to_check_when_the_table_is_wrong(tmp_path, capsys):
    text = write_table(from_devices([address(1, 0), address(2, 0)])).replace('"rank_id": "1"', '"rank_id": "0"')
    assert run(tmp_path, "no-npu", "show", file_of(tmp_path, text)) == 1
    assert "vllm pd ranktable check" in capsys.readouterr().err
    assert run(tmp_path, "no-npu", "show", file_of(tmp_path, "nonsense")) == 1
    assert "t.json:1: fail: not JSON: expected a value, found 'nonsense'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "show"])
def test_control_characters_of_a_file_do_not_reach_the_terminal(command, tmp_path, capsys):
    table = json.loads(write_table(from_devices([address(1, 0), address(2, 0)])))
    table["server_list"][0]["server_id"] = "\x1b[2J[red]x"
    table["\x1b]0;title\x07"] = "y"
    run(tmp_path, "a2-host", command, file_of(tmp_path, json.dumps(table)))
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert "\x07" not in said.out + said.err


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read: No such file"), (b"\xff\xfe", "byte 0 is not UTF-8")]
)
def test_a_file_that_cannot_be_read_is_said(content, message, tmp_path, capsys):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    assert run(tmp_path, "a2-host", "check", path) == 1
    assert message in capsys.readouterr().err


def test_the_verb_is_reached_through_vllm_pd(tmp_path, capsys):
    path = file_of(tmp_path, write_table(from_devices([address(1, 0), address(2, 0)])))
    assert pd_main(["ranktable", "check", str(path), "--offline"]) == 0
    assert "no problem found" in capsys.readouterr().out
