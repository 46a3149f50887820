# SPDX-License-Identifier: Apache-2.0
"""The repacked wheel: RECORD, metadata, names, unchanged members, determinism, and what is refused."""

from __future__ import annotations

import email
import platform
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.fork.builders import ADD_START, RELEASE, UPSTREAM, edit_text, make_repo, make_wheel, record_faults
from tests.fork.elf_files import make_library
from tools.fork.delta import package_version
from tools.fork.errors import ArtefactError, ForkError
from tools.fork.lanes import get_lane
from tools.fork.metadata import fork_version, glibc_of_tag, new_wheel_file, split_wheel_name
from tools.fork.wheel import build_wheel

MACHINE = platform.machine()
LIBRARIES = {"libpd_host.so": make_library(), "libpd_bench.so": make_library()}
NAME = "vllm-9.9.0+pd.7.cpu-cp38-abi3-manylinux_2_28_x86_64.whl"
INFO = "vllm-9.9.0+pd.7.cpu.dist-info"


@pytest.fixture
def repo(tmp_path):
    modules = {"pd/new.py": "x = 1\n", "pd/__init__.py": "", "pd/new.pyi": "x: int\n", "pd/data.txt": "no"}
    return make_repo(tmp_path / "repo", {"engine.edit.py": edit_text(ADD_START)}, modules)


@pytest.fixture
def upstream(tmp_path):
    return make_wheel(tmp_path, {"vllm/engine.py": UPSTREAM, "vllm/other.py": b"y = 2\n" * 500})


@pytest.fixture
def built(repo, upstream, tmp_path):
    return build_wheel(get_lane("cpu", repo), upstream, tmp_path / "dist", LIBRARIES, repo)


def members(path):
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def test_record_lists_every_member_with_its_hash_and_size(built):
    assert record_faults(built) == []


def test_a_wrong_record_would_be_noticed(built, tmp_path):
    broken = tmp_path / "broken.whl"
    with zipfile.ZipFile(built) as source, zipfile.ZipFile(broken, "w") as out:
        for info in source.infolist():
            data = source.read(info)
            out.writestr(info.filename, data + b"#" if info.filename == "vllm/engine.py" else data)
        out.writestr("vllm/extra.py", b"")
    assert sorted(record_faults(broken)) == ["not in RECORD: vllm/extra.py", "wrong hash or size: vllm/engine.py"]


def test_the_wheel_holds_upstream_the_edits_our_modules_and_our_package(built, upstream):
    was, now = members(upstream), members(built)
    assert built.name == NAME
    unchanged = [n for n in was if n.startswith("vllm/") and not n.endswith((".pyc", "engine.py"))]
    assert {n: now[n] for n in unchanged} == {n: was[n] for n in unchanged}
    own = b"        pd_start(self)  # ascend-pd: vllm/engine.edit.py\n"
    assert own in now["vllm/engine.py"]
    assert now["vllm/engine.py"].replace(own, b"") == UPSTREAM
    assert {n for n in set(now) - set(was) if not n.startswith("vllm-9")} == {
        "vllm/pd/__init__.py",
        "vllm/pd/new.py",
        "vllm/pd/new.pyi",
        "vllm_ascend_pd/__init__.py",
        "vllm_ascend_pd/deep/hooks.py",
        "vllm_ascend_pd/native/libpd_bench.so",
        "vllm_ascend_pd/native/libpd_host.so",
        "vllm_ascend_pd/py.typed",
    }
    assert now["vllm_ascend_pd/native/libpd_host.so"] == LIBRARIES["libpd_host.so"]
    assert not [n for n in now if n.endswith(".pyc")]
    assert now["vllm-9.9.0+pd.7.cpu.data/data/share/x.txt"] == b"data"


def test_metadata_names_the_fork_and_asks_only_for_what_an_index_has(built):
    message = email.message_from_bytes(members(built)[f"{INFO}/METADATA"])
    assert (message["Name"], message["Version"]) == ("vllm", "9.9.0+pd.7.cpu")
    assert message.get_all("Requires-Dist") == [
        "regex",
        "msg.spec",
        "torch-but-not-torch>=1",
        "torch==2.0",
        "pd-only>=2",
        'pd-only>=1; extra == "some"',
        'zentorch==2; extra == "zen"',
    ]
    assert message.get_all("Project-URL") == ["Homepage, https://example.org"]
    assert message["Maintainer-email"] is None
    assert message.get_payload() == "# Readme\n\nName: not a header\nRequires-Dist: torch\n"


def test_licences_of_upstream_and_ours_are_inside_and_named(built):
    files = members(built)
    message = email.message_from_bytes(files[f"{INFO}/METADATA"])
    named = message.get_all("License-File")
    assert named == ["LICENSE", "vllm_ascend_pd/LICENSE", "vllm_ascend_pd/NOTICE"]
    assert [files[f"{INFO}/licenses/{n}"] for n in named] == [
        b"upstream's licence\n",
        b"our licence\n",
        b"our notice\n",
    ]


def test_entry_point_tag_and_upstreams_version_module_are_kept(built):
    files = members(built)
    assert files[f"{INFO}/entry_points.txt"] == b"[console_scripts]\nvllm = vllm.cli:main\n"
    assert files[f"{INFO}/top_level.txt"] == b"vllm\nvllm_ascend_pd\n"
    assert files["vllm/_version.py"] == b"__version__ = '9.9.0'\n"
    wheel = email.message_from_bytes(files[f"{INFO}/WHEEL"])
    assert wheel.get_all("Tag") == ["cp38-abi3-manylinux_2_28_x86_64"]
    assert (wheel["Wheel-Version"], wheel["Root-Is-Purelib"]) == ("1.0", "false")


def test_libraries_stay_executable_and_record_is_last(built):
    with zipfile.ZipFile(built) as archive:
        modes = {i.filename: (i.external_attr >> 16) & 0o7777 for i in archive.infolist()}
        assert modes["vllm/_C.abi3.so"] == 0o755
        assert modes["vllm_ascend_pd/native/libpd_host.so"] == 0o755
        assert modes["vllm/engine.py"] == 0o644
        assert archive.namelist()[-1] == f"{INFO}/RECORD"


def test_the_same_inputs_give_the_same_bytes(repo, upstream, tmp_path, built):
    first = built.read_bytes()
    assert build_wheel(get_lane("cpu", repo), upstream, tmp_path / "again", LIBRARIES, repo).read_bytes() == first
    (repo / "vllm_ascend_pd/deep/hooks.py").write_text("def pd_start(engine):\n    return\n")
    assert build_wheel(get_lane("cpu", repo), upstream, tmp_path / "dist", LIBRARIES, repo).read_bytes() != first


def test_pip_installs_it_and_the_installed_distribution_says_its_version(repo, tmp_path):
    upstream = make_wheel(
        tmp_path, {"vllm/engine.py": UPSTREAM, "vllm/__init__.py": b""}, tag=f"py3-none-linux_{MACHINE}"
    )
    libraries = {"libpd_host.so": make_library(MACHINE)}
    built = build_wheel(get_lane("cpu", repo), upstream, tmp_path / "dist", libraries, repo)
    site = tmp_path / "site"
    own = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    pip = [sys.executable, "-m", "pip"] if own else [shutil.which("pip3") or shutil.which("pip") or ""]
    if not pip[0]:
        pytest.skip("this machine has no pip")
    command = [*pip, "install", "--no-deps", "--no-index", "--no-compile", "--target", str(site), str(built)]
    subprocess.run(command, check=True, capture_output=True)
    code = "import importlib.metadata as m, vllm._version as v; print(m.version('vllm'), v.__version__)"
    shown = subprocess.run([sys.executable, "-S", "-c", code], cwd=site, check=True, capture_output=True, text=True)
    assert shown.stdout.split() == ["9.9.0+pd.7.cpu", "9.9.0"]


def test_a_module_of_ours_that_upstream_has_already_stops(repo, tmp_path):
    upstream = make_wheel(tmp_path, {"vllm/engine.py": UPSTREAM, "vllm/pd/new.py": b""})
    with pytest.raises(ForkError, match="has these new modules of ours already: vllm/pd/new.py"):
        build_wheel(get_lane("cpu", repo), upstream, tmp_path / "dist", LIBRARIES, repo)


def test_a_lost_anchor_leaves_no_wheel_behind(repo, tmp_path):
    upstream = make_wheel(tmp_path, {"vllm/engine.py": b"class Engine:\n    pass\n"})
    with pytest.raises(ForkError, match="does not define Engine.start"):
        build_wheel(get_lane("cpu", repo), upstream, tmp_path / "dist", LIBRARIES, repo)
    assert list((tmp_path / "dist").iterdir()) == []


def test_a_library_that_lies_in_the_checkout_is_not_taken_for_the_wheels(repo, upstream, tmp_path):
    """It may be another machine's, or older than the sources."""
    (repo / "vllm_ascend_pd/native").mkdir()
    (repo / "vllm_ascend_pd/native/libpd_host.so").write_bytes(b"of another day")
    built = build_wheel(get_lane("cpu", repo), upstream, tmp_path / "dist", LIBRARIES, repo)
    assert members(built)["vllm_ascend_pd/native/libpd_host.so"] == LIBRARIES["libpd_host.so"]


def test_a_wheel_without_the_library_is_refused(repo, upstream, tmp_path):
    with pytest.raises(ForkError, match="would lack vllm_ascend_pd/native/libpd_host.so: run `python -m tools.native"):
        build_wheel(get_lane("cpu", repo), upstream, tmp_path / "dist", {"libpd_bench.so": make_library()}, repo)
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize(
    ("tag", "library", "said"),
    [
        ("cp38-abi3-manylinux_2_28_aarch64", make_library(), "is built for x86_64, want aarch64"),
        (
            "cp38-abi3-manylinux_2_17_x86_64",
            make_library(versions=["GLIBC_2.18"]),
            "needs glibc 2.18, want at most glibc 2.17",
        ),
        ("cp38-abi3-manylinux2014_x86_64", make_library(versions=["GLIBC_2.18"]), "want at most glibc 2.17"),
        ("py3-none-linux_x86_64", make_library(versions=["GLIBC_2.34"]), "needs glibc 2.34, want at most glibc 2.28"),
        ("py3-none-any", make_library(), "want manylinux_X_Y_MACHINE, not 'any'"),
        ("py3-none-manylinux1_x86_64.manylinux_2_28_aarch64", make_library(), "names several machines"),
        ("py3-none-manylinux_2_28_x86_64", b"text", "is not a 64-bit"),
    ],
)
def test_a_tag_that_the_library_does_not_keep_is_refused(repo, tmp_path, tag, library, said):
    upstream = make_wheel(tmp_path, {"vllm/engine.py": UPSTREAM}, tag=tag)
    with pytest.raises(ForkError, match=said):
        build_wheel(get_lane("cpu", repo), upstream, tmp_path / "dist", {"libpd_host.so": library}, repo)


def test_the_oldest_glibc_of_a_tag_set_counts():
    assert glibc_of_tag("py3-none-manylinux_2_17_x86_64.manylinux2010_x86_64") == ("x86_64", (2, 12))
    assert glibc_of_tag("py3-none-linux_aarch64") == ("aarch64", None)


def test_a_damaged_upstream_wheel_is_refused(repo, upstream, tmp_path):
    data = bytearray(upstream.read_bytes())
    with zipfile.ZipFile(upstream) as archive:
        at = archive.getinfo("vllm/other.py").header_offset
    data[at : at + 4] = b"XXXX"
    upstream.write_bytes(bytes(data))
    with pytest.raises((ArtefactError, zipfile.BadZipFile)):
        build_wheel(get_lane("cpu", repo), upstream, tmp_path / "dist", LIBRARIES, repo)


def test_version_is_the_release_ours_and_the_lane():
    assert fork_version("0.23.0", "3", "ascend-cpu") == "0.23.0+pd.3.ascend.cpu"
    with pytest.raises(ForkError, match="dotted numbers"):
        fork_version("0.23.0", "1-dev", "cpu")


def test_compressed_tag_sets_are_written_out_one_by_one():
    name = "x-1-py2.py3-none-manylinux1_x86_64.manylinux2014_x86_64.whl"
    text = new_wheel_file("Wheel-Version: 1.0\nTag: bad\n", split_wheel_name(name)[2])
    assert [line for line in text.splitlines() if line.startswith("Tag:")] == [
        "Tag: py2-none-manylinux1_x86_64",
        "Tag: py2-none-manylinux2014_x86_64",
        "Tag: py3-none-manylinux1_x86_64",
        "Tag: py3-none-manylinux2014_x86_64",
    ]


def test_release_and_version_come_from_the_files_not_from_imports(repo):
    assert package_version(repo) == "7"
    assert get_lane("cpu", repo).release == RELEASE
