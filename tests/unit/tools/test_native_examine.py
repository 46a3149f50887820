# SPDX-License-Identifier: Apache-2.0
"""Running tests, sanitizers, clang-tidy, qemu and auditwheel: what is decided around them."""

import subprocess
from pathlib import Path

import pytest

from tools.cache import CacheError
from tools.native import __main__ as command
from tools.native import emulation, testing, tidy
from tools.native.audit import is_within, parse_answer
from tools.native.testing import find_system_compiler, find_tests, run_test, run_tests


@pytest.fixture
def programs(tmp_path):
    """Executables that do what their text says."""

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        return tmp_path

    return write


def test_passed_and_failed_executables_are_counted_and_only_the_failed_speak(programs, capsys):
    folder = programs(good="echo quiet", bad="echo expected 1 got 2; exit 1")
    assert not run_tests(folder, ["good", "bad"], [], "here")
    said = capsys.readouterr().out
    assert "expected 1 got 2" in said
    assert "quiet" not in said
    assert said.splitlines()[-1] == "native: 1 passed, 1 failed"
    assert run_tests(folder, ["good"], [], "here")


def test_an_executable_that_was_killed_or_hangs_has_failed(programs):
    folder = programs(killed="kill -11 $$", hangs="echo so far; exec sleep 60")
    assert not run_test(folder / "killed", []).is_good
    outcome = run_test(folder / "hangs", [], timeout_s=0.3)
    assert not outcome.is_good
    assert outcome.output == "so far\nstill running after 0 s"


def test_an_emulated_program_runs_behind_its_emulator_and_knows_it(programs):
    folder = programs(qemu='shift 2; exec "$@"', program='test "$PD_EMULATED" = 1')
    assert run_test(folder / "program", [str(folder / "qemu"), "-L", "/root"]).is_good
    assert not run_test(folder / "program", []).is_good


def test_tests_are_chosen_by_a_part_of_their_name(tmp_path):
    (tmp_path / "tests/csrc").mkdir(parents=True)
    for name in ("copy_plan.cpp", "plane_frames.cpp", "testing.h"):
        (tmp_path / "tests/csrc" / name).touch()
    assert find_tests([], tmp_path) == ["copy_plan", "plane_frames"]
    assert find_tests(["plane"], tmp_path) == ["plane_frames"]
    with pytest.raises(
        CacheError, match="--only other: no such test in tests/csrc; there are: copy_plan, plane_frames"
    ):
        find_tests(["other"], tmp_path)


def test_without_a_system_compiler_the_sanitizers_say_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CacheError, match=r"apt-get install g\+\+"):
        find_system_compiler()


def test_where_apt_is_missing_the_emulator_is_asked_for_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("VLLM_PD_CACHE", str(tmp_path))
    monkeypatch.setattr(emulation.platform, "machine", lambda: "x86_64")
    with pytest.raises(CacheError, match="install qemu-user-static"):
        emulation.find_emulation("aarch64")
    assert emulation.find_emulation("x86_64") == []


def test_a_kept_emulator_is_used_while_it_has_its_hash(monkeypatch, tmp_path):
    folder = tmp_path / "tools/qemu-aarch64"
    folder.mkdir(parents=True)
    (folder / emulation.EMULATOR).write_bytes(b"qemu")
    assert not emulation.is_intact(folder)
    (folder / "sha256.txt").write_text(emulation.compute_sha256(folder / emulation.EMULATOR))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("VLLM_PD_CACHE", str(tmp_path))
    monkeypatch.setattr(emulation.platform, "machine", lambda: "x86_64")
    prefix = emulation.find_emulation("aarch64")
    assert prefix == [str(folder / emulation.EMULATOR), "-L", str(folder / "usr/aarch64-linux-gnu")]
    (folder / emulation.EMULATOR).write_bytes(b"other")
    assert not emulation.is_intact(folder)


def test_package_lists_of_our_own_are_tried_when_the_systems_do_not_do(monkeypatch, tmp_path):
    ran = []

    def run(words, folder):
        ran.append([word for word in words if word in ("update", "download")][0])
        if len(ran) == 3:
            for name in emulation.PACKAGES:
                (folder / f"{name}_1_all.deb").touch()
        return subprocess.CompletedProcess(words, 100 if len(ran) == 1 else 0, "unable to locate")

    monkeypatch.setattr(emulation, "_run", run)
    assert len(emulation.download(tmp_path / "packages")) == 2
    assert ran == ["download", "update", "download"]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """One C++ file, and a clang-tidy that finds what `.findings` says and counts its calls."""
    monkeypatch.setenv("VLLM_PD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "csrc_npu/src").mkdir(parents=True)
    (tmp_path / ".clang-tidy").write_text("Checks: '*'\n")
    (tmp_path / "csrc_npu/src/a.cpp").write_text("int a;\n")
    monkeypatch.setattr(tidy, "fetch_toolchain", lambda: None)
    monkeypatch.setattr(tidy, "fetch_tool", lambda pin: None)
    monkeypatch.setattr(tidy, "find_program", lambda folder, name: Path("/clang-tidy"))
    monkeypatch.setattr(tidy, "read_system_flags", lambda tools, machine, root: [machine])

    class Source:
        root = tmp_path
        findings = ""
        seen: list = []

        def examine(self, program, path, flags, root):
            self.seen.append((path.name, flags[0]))
            return self.findings

        def tidy(self):
            self.seen.clear()
            return tidy.tidy([], tmp_path), list(self.seen)

    made = Source()
    monkeypatch.setattr(tidy, "run_clang_tidy", made.examine)
    return made


def test_a_clean_file_is_looked_at_once_and_again_when_it_or_the_checks_change(source):
    assert source.tidy() == (True, [("a.cpp", "x86_64")])
    assert source.tidy() == (True, [])
    for name in (".clang-tidy", "csrc_npu/src/a.cpp", "csrc_npu/new.h"):
        with (source.root / name).open("a") as file:
            file.write("// changed\n")
        assert source.tidy() == (True, [("a.cpp", "x86_64")])


def test_a_file_with_findings_fails_until_they_are_gone(source, capsys):
    source.findings = "a.cpp:1: bad name"
    assert source.tidy()[0] is False
    assert source.tidy()[0] is False
    assert "a.cpp:1: bad name" in capsys.readouterr().out
    source.findings = ""
    assert source.tidy()[0] is True


def test_code_for_the_other_machine_is_looked_at_as_that_machine_sees_it(source):
    (source.root / "csrc_npu/src/a.cpp").write_text("#if defined(__aarch64__)\nint a;\n#endif\n")
    assert sorted(source.tidy()[1]) == [("a.cpp", "aarch64"), ("a.cpp", "x86_64")]


def test_header_folders_are_taken_from_the_line_that_zig_prints():
    line = "/zig clang a.cpp -target t -fPIC -nostdinc -DNDEBUG -isystem /zig/libcxx -D_LIBCPP_X=1 -Werror=date-time"
    flags = tidy.parse_system_flags(f"noise\n{line}\n")
    assert flags == ["-target", "t", "-nostdinc", "-isystem", "/zig/libcxx", "-D_LIBCPP_X=1"]
    with pytest.raises(CacheError, match="did not say where its headers are"):
        tidy.parse_system_flags("error: no such target")


def test_auditwheels_answer_is_found_in_its_prose():
    text = 'x.whl\nis consistent with the\nfollowing platform tag: "manylinux_2_17_x86_64".\n'
    assert parse_answer(text) == "manylinux_2_17_x86_64"
    with pytest.raises(CacheError, match="named no platform tag"):
        parse_answer("This does not look like a platform wheel")


@pytest.mark.parametrize(
    ("tag", "is_kept"),
    [
        ("manylinux_2_28_x86_64", True),
        ("manylinux_2_5_x86_64", True),
        ("manylinux_2_29_x86_64", False),
        ("manylinux_3_0_x86_64", False),
        ("manylinux_2_17_aarch64", False),
        ("linux_x86_64", False),
    ],
)
def test_a_platform_tag_is_held_against_the_oldest_glibc(tag, is_kept):
    assert is_within(tag, "x86_64", (2, 28)) is is_kept


def test_all_verbs_run_and_one_that_failed_decides_the_exit_code(monkeypatch, capsys):
    ran = []

    def verb(name, result):
        def run(args):
            ran.append(name)
            if isinstance(result, Exception):
                raise result
            return result

        return run

    found = {"build": CacheError("no compiler"), "test": True, "tidy": False}
    for name, result in found.items():
        monkeypatch.setitem(command.VERBS, name, verb(name, result))
    assert command.main(["build", "test", "tidy"]) == 1
    assert ran == ["build", "test", "tidy"]
    assert "error: build: no compiler" in capsys.readouterr().err
    assert command.main(["test"]) == 0


def test_no_test_file_is_not_taken_for_all_targets():
    testing.run_ninja(None, Path("/nowhere"), [])  # would fail on the tools that are not there
