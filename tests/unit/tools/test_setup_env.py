# SPDX-License-Identifier: Apache-2.0
"""What set-up does when something changed, over a checkout and an installer that only record."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from tools import installer, setup_env
from tools.installer import Installer, find_local_torch, get_find_links
from tools.setup_env import Stamp, compute_wheel_key, find_cached_wheel, install_everything, prune_wheels

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A small checkout; `.steps` is what the installer was told, `.requires` what the built wheel asks for."""
    root = tmp_path / "checkout"
    (root / "vllm_ascend_pd").mkdir(parents=True)
    (root / "vllm_ascend_pd/a.py").write_text("1")
    (root / "pyproject.toml").write_text('[dependency-groups]\ndev = ["pytest>=8"]\n')
    (root / ".venv").mkdir()
    monkeypatch.setenv("VLLM_PD_CACHE", str(tmp_path / "cache"))
    for name, value in (("ROOT", root), ("VENV", root / ".venv"), ("STAMP", root / ".venv/stamp.json")):
        monkeypatch.setattr(setup_env, name, value)

    class Checkout:
        path = root
        steps: list = []
        requires = "torch==2.13.0"
        is_broken = False

        def build_libraries(self):
            """Free where nothing changed; tests/unit/tools/test_native_build.py has that."""

        def install(self, requirements, *, with_torch=False):
            self.steps.append("everything" if with_torch else "tools")

        def reinstall(self, wheel):
            self.steps.append("wheel")

        def build(self, command, **_):
            self.steps.append("build")
            if self.is_broken:
                raise subprocess.CalledProcessError(1, command)
            wheel = Path(command[command.index("--out") + 1]) / "vllm-1-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("vllm-1.dist-info/METADATA", f"Name: vllm\nRequires-Dist: {self.requires}\n\ntext")

        def setup(self, interpreter="python"):
            self.steps.clear()
            old = Stamp.read(setup_env.STAMP)
            install_everything(old, interpreter)
            return list(self.steps)

    made = Checkout()
    monkeypatch.setattr(setup_env, "find_installer", lambda python: made)
    monkeypatch.setattr(setup_env, "build_libraries", lambda: made.build_libraries())
    monkeypatch.setattr(setup_env.subprocess, "run", made.build)
    return made


def test_a_fresh_environment_gets_everything(checkout):
    assert checkout.setup() == ["tools", "build", "everything"]


def test_nothing_is_done_when_nothing_changed(checkout):
    checkout.setup()
    assert checkout.setup() == []


def test_a_changed_source_costs_its_wheel_only(checkout):
    checkout.setup()
    (checkout.path / "vllm_ascend_pd/a.py").write_text("2")
    assert checkout.setup() == ["build", "wheel"]


@pytest.mark.parametrize("name", ["csrc_npu/src/a.cpp", "csrc_npu/include/pd/c_api.h", "csrc_npu/CMakeLists.txt"])
def test_a_changed_native_source_costs_its_wheel_and_the_npu_part_does_not(checkout, name):
    checkout.setup()
    (checkout.path / name).parent.mkdir(parents=True, exist_ok=True)
    (checkout.path / name).write_text("2")
    assert checkout.setup() == ["build", "wheel"]
    (checkout.path / "csrc_npu/npu").mkdir()
    (checkout.path / "csrc_npu/npu/a.cpp").write_text("2")
    assert checkout.setup() == []


def test_the_built_library_in_the_package_is_no_source(checkout):
    checkout.setup()
    (checkout.path / "vllm_ascend_pd/native").mkdir()
    (checkout.path / "vllm_ascend_pd/native/libpd_host.so").write_bytes(b"built")
    assert checkout.setup() == []


def test_the_libraries_are_seen_to_even_when_the_environment_is_up_to_date(checkout):
    checkout.setup()
    checkout.build_libraries = lambda: checkout.steps.append("libraries")
    assert checkout.setup() == ["libraries"]


def test_a_wheel_that_was_built_before_comes_from_the_cache(checkout):
    checkout.setup()
    (checkout.path / "vllm_ascend_pd/a.py").write_text("2")
    checkout.setup()
    (checkout.path / "vllm_ascend_pd/a.py").write_text("1")
    assert checkout.setup() == ["wheel"]


def test_a_new_dependency_of_the_wheel_is_installed(checkout):
    checkout.setup()
    (checkout.path / "vllm_ascend_pd/a.py").write_text("2")
    checkout.requires = "torch==2.14.0"
    assert checkout.setup() == ["build", "everything"]


def test_over_an_installed_wheel_of_the_same_version_the_new_one_is_forced(checkout):
    (checkout.path / ".venv/lib/python3.11/site-packages/vllm-1.dist-info").mkdir(parents=True)
    assert checkout.setup() == ["tools", "build", "everything", "wheel"]


def test_a_new_development_tool_is_installed(checkout):
    checkout.setup()
    (checkout.path / "pyproject.toml").write_text('[dependency-groups]\ndev = ["pytest>=8", "ruff"]\n')
    assert checkout.setup()[0] == "tools"


def test_another_python_starts_over(checkout):
    checkout.setup()
    assert checkout.setup("another python") == ["tools", "everything"]


def test_an_interrupted_set_up_is_not_taken_for_a_finished_one(checkout):
    checkout.setup()
    (checkout.path / "vllm_ascend_pd/a.py").write_text("2")
    checkout.is_broken = True
    with pytest.raises(subprocess.CalledProcessError):
        checkout.setup()
    (checkout.path / "vllm_ascend_pd/a.py").write_text("1")
    assert checkout.setup() == ["tools", "everything"]


def test_a_damaged_wheel_in_the_cache_is_not_used(checkout):
    checkout.setup()
    key = compute_wheel_key()
    wheel = find_cached_wheel(key)
    wheel.write_bytes(wheel.read_bytes() + b"x")
    assert find_cached_wheel(key) is None
    setup_env.STAMP.unlink()
    assert checkout.setup() == ["tools", "build", "everything"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"interpreter": "x"}', '{"a": 1}'])
def test_a_stamp_that_makes_no_sense_is_no_stamp(tmp_path, text):
    (tmp_path / "stamp").write_text(text)
    assert Stamp.read(tmp_path / "stamp") is None


def test_only_the_newest_wheels_are_kept(tmp_path):
    import os

    for number in range(6):
        (tmp_path / f"w{number}").mkdir()
        os.utime(tmp_path / f"w{number}", (number, number))
    prune_wheels(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w4", "w5"]


def test_a_local_cpu_torch_is_found_where_pip_looks(tmp_path, monkeypatch):
    wheel = tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"
    wheel.touch()
    (tmp_path / "torch-2.13.0-cp311-cp311-linux_x86_64.whl").touch()
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} file:///nowhere {tmp_path}")
    assert get_find_links() == [str(tmp_path), "file:///nowhere"]
    assert find_local_torch(get_find_links()) == wheel
    assert find_local_torch([f"file://{tmp_path}"]) == wheel
    assert find_local_torch(["/nowhere"]) is None
    assert find_local_torch([str(tmp_path)], "2.13.0") == wheel
    assert find_local_torch([str(tmp_path)], "2.11.0") is None


@pytest.mark.parametrize(
    ("uv", "local", "reachable", "expected"),
    [
        ("/uv", True, False, []),
        ("/uv", False, True, ["--torch-backend", "cpu"]),
        ("/uv", False, False, []),
        (None, False, True, []),
    ],
)
def test_the_build_of_torch_is_chosen_and_said(monkeypatch, capsys, uv, local, reachable, expected):
    ran = []

    def run(command, **_):
        ran.append(command)
        return subprocess.CompletedProcess(command, 0 if reachable else 1)

    monkeypatch.setattr(
        installer, "find_local_torch", lambda places, release: Path("/torch+cpu.whl") if local else None
    )
    monkeypatch.setattr(installer.subprocess, "run", run)
    Installer(Path("/python"), Path(uv) if uv else None).install(["thing"], with_torch=True)
    assert ran[-1][-1 - len(expected) : -1] == expected
    assert ("CUDA" in capsys.readouterr().out) == (not local and not expected)


@pytest.mark.parametrize("uv", ["/uv", None])
def test_what_is_to_be_left_out_is_overridden_where_uv_installs(monkeypatch, uv):
    overridden = []

    def run(command, **_):
        if "--override" in command:
            overridden.extend(Path(command[command.index("--override") + 1]).read_text().splitlines())
        assert command[-1] == "thing"
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(installer.subprocess, "run", run)
    Installer(Path("/python"), Path(uv) if uv else None).install(["thing"], leave_out=["triton", "x"])
    assert overridden == (["triton ; python_version < '3'", "x ; python_version < '3'"] if uv else [])


def run_setup_sh(tmp_path, **env):
    command = ["/bin/sh", str(ROOT / "tools/setup.sh")]
    return subprocess.run(command, env={"PATH": str(tmp_path), **env}, text=True, capture_output=True, check=False)


def test_without_a_usable_python_set_up_says_what_it_tried(tmp_path):
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    for name, code in (("python3.11", "exit 1"), ("python3", 'case "$2" in *version*) exit 0;; esac; exit 1')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    done = run_setup_sh(tmp_path)
    assert done.returncode == 1
    assert "python3.11(not 3.10 to 3.13)" in done.stderr
    assert "python3.12(not found)" in done.stderr
    assert "python3(no venv: on Debian, apt-get install python3-venv)" in done.stderr


def test_the_python_that_is_named_is_the_only_one_tried(tmp_path):
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    done = run_setup_sh(tmp_path, PYTHON="mine")
    assert done.stderr.splitlines()[0].endswith("Tried: mine(not found)")
