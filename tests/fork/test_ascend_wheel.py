# SPDX-License-Identifier: Apache-2.0
"""The wheel of a lane that is built from an sdist: what goes in, what it asks for, and that nothing of it is run."""

from __future__ import annotations

import email
import importlib.util
import platform
import re
import zipfile

import pytest

from tests.fork.builders import ADD_START, UPSTREAM, edit_text, make_repo, make_sdist, record_faults
from tests.fork.elf_files import make_library
from tools.fork.cache import require
from tools.fork.delta import REPO, npu_sources
from tools.fork.empty_target import make_empty_wheel
from tools.fork.errors import ArtefactError, ForkError
from tools.fork.lanes import get_lane
from tools.fork.wheel import build_lane, build_wheel
from tools.native.building import build

LANE = """requires_python = ">=3.10,<3.13"
npu = true
extras = {ascend = ["torch==2.0", "torch-npu==2.0.post4"]}
"""
DATA = {"vllm/__init__.py": b"", "vllm/engine.py": UPSTREAM, "vllm/configs/a.json": b"{}", "vllm/tool.cpp": b"//"}


@pytest.fixture
def repo(tmp_path):
    repo = make_repo(tmp_path / "repo", {"engine.edit.py": edit_text(ADD_START)})
    lanes = repo / "vllm/UPSTREAM.toml"
    lanes.write_text(lanes.read_text().replace('pairs_with = "tests"\n', f'pairs_with = "tests"\n{LANE}'))
    for name in ("npu/module.cpp", "npu/queue.h", "npu/triton/core.cpp", "src/copy_plan.cpp", "include/pd/check.h"):
        (repo / "csrc_npu" / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / "csrc_npu" / name).write_text(name)
    return repo


def build_from(sdist, repo, tmp_path, machine="x86_64"):
    upstream = make_empty_wheel(sdist, "9.9.0", machine, tmp_path)
    return build_wheel(
        get_lane("cpu", repo), upstream, tmp_path / "dist", {"libpd_host.so": make_library(machine)}, repo
    )


def members(path):
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def read_metadata(files):
    return email.message_from_bytes(next(data for name, data in files.items() if name.endswith("/METADATA")))


def test_the_wheel_holds_the_listed_package_the_edits_ours_and_the_npu_sources(repo, tmp_path):
    wheel = build_from(make_sdist(tmp_path, DATA), repo, tmp_path)
    assert wheel.name == "vllm-9.9.0+pd.7.cpu-py3-none-manylinux_2_28_x86_64.whl"
    assert record_faults(wheel) == []
    files = members(wheel)
    assert b"pd_start(self)  # ascend-pd: " in files["vllm/engine.py"]
    assert {name for name in files if name.startswith("vllm/")} == {*DATA, "vllm/_version.py"}
    assert files["vllm/_version.py"] == b"__version__ = '9.9.0'\n"
    place = "vllm_ascend_pd/npu/csrc"
    assert {name for name in files if name.startswith(place)} == {
        f"{place}/include/pd/check.h",
        f"{place}/npu/module.cpp",
        f"{place}/npu/queue.h",
        f"{place}/src/copy_plan.cpp",
    }
    assert files["vllm-9.9.0+pd.7.cpu.dist-info/licenses/LICENSE"] == b"upstream's licence\n"
    assert files["vllm-9.9.0+pd.7.cpu.dist-info/licenses/vllm_ascend_pd/NOTICE"] == b"our notice\n"
    assert files["vllm-9.9.0+pd.7.cpu.dist-info/entry_points.txt"].startswith(b"[console_scripts]\nvllm = ")


def test_it_asks_for_the_common_requirements_and_torch_only_as_an_extra(repo, tmp_path):
    message = read_metadata(members(build_from(make_sdist(tmp_path, DATA), repo, tmp_path)))
    assert message.get_all("Requires-Dist") == [
        "regex",
        "msg-spec>=1",
        'six>=1.16.0; python_version > "3.11"',
        "pd-only>=2",
        'pandas; extra == "bench"',
        'torch==2.0; extra == "ascend"',
        'torch-npu==2.0.post4; extra == "ascend"',
    ]
    assert message.get_all("Provides-Extra") == ["bench", "ascend"]
    assert message["Requires-Python"] == ">=3.10,<3.13"
    assert message.get_all("Classifier") == ["Programming Language :: Python :: 3.12"]
    assert message.get_payload() == "# Readme\n\nRequires-Dist: torch\n"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_tag_promises_the_machine_of_the_library(repo, tmp_path, machine):
    wheel = build_from(make_sdist(tmp_path, DATA), repo, tmp_path, machine)
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{machine}.whl")
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[machine]
    upstream = make_empty_wheel(tmp_path / "vllm-9.9.0.tar.gz", "9.9.0", machine, tmp_path)
    with pytest.raises(ForkError, match=f"is built for {other}, want {machine}"):
        build_wheel(get_lane("cpu", repo), upstream, tmp_path / "no", {"libpd_host.so": make_library(other)}, repo)


def test_the_same_sdist_gives_the_same_bytes(repo, tmp_path):
    sdist = make_sdist(tmp_path, DATA)
    first = build_from(sdist, repo, tmp_path).read_bytes()
    assert build_from(sdist, repo, tmp_path).read_bytes() == first


@pytest.mark.parametrize(
    "name", ["PKG-INFO", "requirements/common.txt", "vllm.egg-info/SOURCES.txt", "LICENSE", "vllm/_version.py"]
)
def test_an_sdist_without_what_its_build_reads_is_refused_by_name(tmp_path, name):
    with pytest.raises(ArtefactError, match=re.escape(f"has no {name}")):
        make_empty_wheel(make_sdist(tmp_path, DATA, drop=(name,)), "9.9.0", "x86_64", tmp_path)


def test_a_listed_source_that_is_missing_is_refused(tmp_path):
    with pytest.raises(ArtefactError, match=r"SOURCES.txt lists files that the sdist lacks: vllm/configs/a.json"):
        make_empty_wheel(make_sdist(tmp_path, DATA, drop=("vllm/configs/a.json",)), "9.9.0", "x86_64", tmp_path)


def test_an_sdist_of_another_release_is_refused(tmp_path):
    with pytest.raises(ArtefactError, match=r"says version 9.9.0, want 9.9.1"):
        make_empty_wheel(make_sdist(tmp_path, DATA), "9.9.1", "x86_64", tmp_path)


def test_a_requirement_that_pkg_info_does_not_know_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.fork.builders.COMMON", "regex\nmsg-spec\nsix\nnew-one>2\n")
    with pytest.raises(ArtefactError, match="asks for what PKG-INFO does not know: new-one"):
        make_empty_wheel(make_sdist(tmp_path, DATA), "9.9.0", "x86_64", tmp_path)


def open_lane(name):
    lane = get_lane(name)
    try:
        return lane, require(lane.readable_artefact(), None)
    except ForkError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_real_ascend_wheel_is_whole(tmp_path, machine):
    lane, artefact = open_lane("ascend")
    libraries = {"libpd_host.so": make_library(machine)}  # `make native-test` builds and runs that of aarch64
    if machine == platform.machine():
        libraries = {name: path.read_bytes() for name, path in build(machine).items()}
    wheel = build_lane(lane, artefact, machine, tmp_path, libraries)
    assert re.fullmatch(rf"vllm-0\.23\.0\+pd\.[0-9.]+\.ascend-py3-none-manylinux_2_28_{machine}\.whl", wheel.name)
    assert record_faults(wheel) == []
    files = members(wheel)
    ours = {p.relative_to(REPO).as_posix() for p in (REPO / "vllm_ascend_pd").rglob("*.py")}
    assert ours | set(npu_sources()) | {"vllm_ascend_pd/native/libpd_host.so"} <= set(files)
    assert "vllm_ascend_pd/npu/csrc/npu/module.cpp" in files
    assert not [name for name in files if name.endswith(("vllm-rs", ".pyc")) or "csrc/npu/triton" in name]
    assert b"# ascend-pd: vllm/v1/worker/gpu_model_runner.edit.py" in files["vllm/v1/worker/gpu_model_runner.py"]
    message = read_metadata(files)
    requires = message.get_all("Requires-Dist")
    assert [r for r in requires if re.match(r"torch(?!-but)|nvidia|flashinfer|numba", r)] == [
        'torch==2.10.0; extra == "ascend"',
        'torch-npu==2.10.0.post4; extra == "ascend"',
    ]
    assert (message["Name"], message["Requires-Python"]) == ("vllm", ">=3.10,<3.13")
    assert len(message.get_all("License-File")) == 3


def test_its_python_is_that_of_the_lane_that_runs_the_same_engine_on_a_cpu(tmp_path):
    lane, sdist = open_lane("ascend")
    _, cpu = open_lane("ascend-cpu")
    empty, kernels = members(make_empty_wheel(sdist, lane.release, "x86_64", tmp_path)), members(cpu)
    ours = {name for name in empty if name.startswith("vllm/")}
    theirs = {name for name in kernels if name.startswith("vllm/") and not name.endswith(("/", ".so"))}
    assert ours == theirs
    differ = {name for name in ours if empty[name] != kernels[name]}
    assert differ == {"vllm/_version.py", "vllm/platforms/__init__.py"}


def test_vllm_says_upstreams_version_and_the_distribution_says_ours(tmp_path):
    lane, sdist = open_lane("ascend")
    wheel = build_lane(lane, sdist, "x86_64", tmp_path, {"libpd_host.so": make_library()})
    files = members(wheel)
    (tmp_path / "_version.py").write_bytes(files["vllm/_version.py"])
    spec = importlib.util.spec_from_file_location("pd_lane_version", tmp_path / "_version.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.__version__ == "0.23.0"
    assert re.fullmatch(r"0\.23\.0\+pd\.[0-9.]+\.ascend", read_metadata(files)["Version"])
