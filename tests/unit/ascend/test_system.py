# SPDX-License-Identifier: Apache-2.0
"""Commands on the real machine: no shell, a timeout that holds, bounded output."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from vllm_ascend_pd.ascend.devices import CommandError, DeviceError, System, ToolMissingError, hccn_conf
from vllm_ascend_pd.ascend.devices.system import MAX_OUTPUT_BYTES, run_command


def test_words_are_passed_as_they_are():
    result = run_command(["/bin/echo", "$HOME; exit 3", "`id`"], 5)
    assert (result.code, result.text) == (0, "$HOME; exit 3 `id`\n")


def test_stderr_and_exit_code_are_kept():
    result = run_command(["/bin/sh", "-c", "echo out; echo err >&2; exit 7"], 5)
    assert (result.code, result.text) == (7, "out\nerr\n")


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path):
    note = tmp_path / "child"
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        run_command(["/bin/sh", "-c", f"sleep 60 & echo $! > {note}; sleep 60"], 3.0)
    assert time.monotonic() - started < 20
    child = int(note.read_text())
    while is_running(child) and time.monotonic() - started < 25:  # killed, and gone when the kernel gets to it
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid):
    """Whether the process lives; a zombie that nobody has collected yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_output_is_bounded():
    assert len(run_command(["/usr/bin/head", "-c", "3000000", "/dev/zero"], 10).text) == MAX_OUTPUT_BYTES


def fake_tool(tmp_path, script, name="npu-smi"):
    place = tmp_path / "bin" / name
    place.parent.mkdir()
    place.write_text(f"#!/bin/sh\n{script}\n")
    place.chmod(0o755)
    return System(environ={"PATH": str(place.parent)}, timeout_s=0.2)


def test_a_tool_that_hangs_is_an_error_with_the_command(tmp_path):
    with pytest.raises(CommandError, match=r"`npu-smi info -m` did not end within 0.2 s"):
        fake_tool(tmp_path, "sleep 30").call("npu-smi", "info", "-m")


def test_a_tool_that_cannot_be_started_is_an_error_with_the_command(tmp_path):
    system = fake_tool(tmp_path, "")
    (tmp_path / "bin" / "npu-smi").write_text("#!/no/such/interpreter\n")
    with pytest.raises(CommandError, match=r"`npu-smi info` cannot be started: No such file"):
        system.call("npu-smi", "info")


def test_a_tool_that_is_not_there_says_what_to_mount(tmp_path):
    with pytest.raises(ToolMissingError, match="hccn_tool is not here; mount /usr/local/Ascend/driver/tools"):
        System(root=tmp_path, environ={}).call("hccn_tool", "-i", "0", "-ip", "-g")


def test_a_file_that_may_not_be_read_is_an_error(tmp_path):
    (tmp_path / "etc" / "hccn.conf").mkdir(parents=True)
    with pytest.raises(DeviceError, match=r"/etc/hccn.conf: cannot be read: Is a directory"):
        hccn_conf(System(root=tmp_path))


def test_a_missing_conf_is_no_error(tmp_path):
    assert not hccn_conf(System(root=tmp_path)).present
