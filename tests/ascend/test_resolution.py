# SPDX-License-Identifier: Apache-2.0
"""What an installer makes of `vllm[ascend]`: over indexes of stub wheels with the real requirements of each project.

What was read in the published wheels of torch-npu 2.10.0.post4: those for x86-64 require `torch ==2.10.0+cpu`, those
for aarch64 `torch ==2.10.0`. The package index has torch 2.10.0 without a local version; PyTorch's own CPU index has
2.10.0+cpu for both machines.
"""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.ascend.stub_index import fill, find_version, write_metadata_wheel, write_wheel
from tests.fork.elf_files import make_library
from tools.ascend.sources import SDIST
from tools.fork.cache import require
from tools.fork.errors import ForkError
from tools.fork.index import Index
from tools.fork.lanes import get_lane
from tools.fork.wheel import build_lane
from tools.installer import find_installer
from vllm_ascend_pd.ascend.pairing import TORCH, TORCH_NPU, TRITON_ASCEND

PLATFORMS = {"x86_64": "x86_64-manylinux_2_28", "aarch64": "aarch64-manylinux_2_28"}
TORCH_WORKED = ("torch", "torch-npu", "torchvision", "torchaudio", "triton-ascend", "vllm", "vllm-ascend")


def read_metadata(path: Path):
    """The METADATA of the lane's wheel, and PKG-INFO of vllm-ascend's sdist."""
    import zipfile

    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            return archive.read(name).decode()
    with tarfile.open(path) as archive:
        member = next(m for m in archive if m.name.endswith("/PKG-INFO") and m.name.count("/") == 1)
        return archive.extractfile(member).read().decode()


@pytest.fixture(scope="module")
def indexes(tmp_path_factory):
    """Three of them: the package index, PyTorch's CPU index, Ascend's (triton-ascend 3.2.2 is on no other)."""
    root = tmp_path_factory.mktemp("indexes")
    lane = get_lane("ascend")
    try:
        sdist, ascend = require(lane.artefact(), Index()), require(SDIST, Index())
    except ForkError as error:
        pytest.skip(f"run `python -m tools.fork fetch` and `python -m tools.ascend fetch`: {error}")
    pypi, pytorch, huawei = root / "pypi", root / "pytorch", root / "huawei"
    theirs = read_metadata(ascend)
    ours = ""
    for machine in PLATFORMS:
        wheel = build_lane(lane, sdist, machine, root, {"libpd_host.so": make_library(machine)})
        ours = read_metadata(wheel)
        version = str(email.message_from_string(ours)["Version"])
        tag = f"cp311-cp311-manylinux_2_28_{machine}"
        write_metadata_wheel(pypi, ours, "vllm", version, f"py3-none-manylinux_2_28_{machine}")
        for release in (TORCH, "2.13.0"):
            write_wheel(pypi, "torch", release, tag=tag)
        write_wheel(pytorch, "torch", f"{TORCH}+cpu", tag=tag)
        write_wheel(pytorch, "torchvision", "0.25.0+cpu", [f"torch=={TORCH}"], tag=tag)
        local = "+cpu" if machine == "x86_64" else ""
        write_wheel(pypi, "torch-npu", TORCH_NPU, [f"torch ==2.10.0{local}"], tag=tag)
    write_metadata_wheel(pypi, theirs, "vllm-ascend", "0.23.0.post1", "py3-none-any")
    write_wheel(pypi, "torchvision", "0.25.0", [f"torch=={TORCH}"])
    write_wheel(pypi, "torchaudio", TORCH)
    write_wheel(pypi, "triton-ascend", "3.2.0")
    write_wheel(huawei, "triton-ascend", TRITON_ASCEND)
    lines = [r for text in (ours, theirs) for r in email.message_from_string(text).get_all("Requires-Dist")]
    plain = [line for line in lines if "extra ==" not in line]
    assert fill(pypi, plain, without=TORCH_WORKED) == []
    return {"pypi": pypi, "pytorch": pytorch, "huawei": huawei}


def uv(indexes, wanted, machine, extra=()):
    """What uv would install; its words when it cannot."""
    installer = find_installer(Path(sys.executable))
    if installer.uv is None:
        pytest.skip("uv is not to be had")
    command = [str(installer.uv), "pip", "compile", "-", "--no-config", "--no-cache", "--no-header", "--no-annotate"]
    command += ["--python-platform", PLATFORMS[machine], "--python-version", "3.11", "--no-build"]
    command += ["--index-url", indexes["pypi"].as_uri()]
    for name in extra:
        command += ["--extra-index-url", indexes[name].as_uri()]
    done = subprocess.run(command, input="\n".join(wanted), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def pip(indexes, wanted, machine, target, extra=()):
    """What pip would install; its words when it cannot."""
    base = Path(sys.base_prefix) / "bin/python3"
    pip = [str(base), "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode:
        pip = [shutil.which("pip3") or ""]
    if not pip[0]:
        pytest.skip("this machine has no pip")
    command = [*pip, "--isolated", "--disable-pip-version-check", "--no-cache-dir", "install", "--dry-run"]
    command += ["--ignore-installed", "--target", str(target), "--only-binary", ":all:", "--implementation", "cp"]
    command += ["--platform", f"manylinux_2_28_{machine}", "--python-version", "3.11"]
    command += ["--index-url", indexes["pypi"].as_uri()]
    for name in extra:
        command += ["--extra-index-url", indexes[name].as_uri()]
    environ = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null", "HOME": str(target)}
    done = subprocess.run([*command, *wanted], capture_output=True, text=True, check=False, env=environ)
    return done.returncode, done.stdout + done.stderr


def pinned(text):
    """`torch==2.10.0+cpu` and the like in uv's or pip's answer, by project."""
    found = dict(re.findall(r"^([a-z0-9.-]+)==(\S+)$", text, re.MULTILINE))
    would = re.search(r"Would install (.*)", text)
    for item in would[1].split() if would else ():
        name, _, version = item.rpartition("-")
        found[name.replace("_", "-")] = version
    return found


OURS = "vllm[ascend]"


def test_on_x86_64_the_package_index_alone_cannot_do_it(indexes, tmp_path):
    for code, said in (uv(indexes, [OURS], "x86_64"), pip(indexes, [OURS], "x86_64", tmp_path)):
        assert code != 0
        assert "torch==2.10.0+cpu" in said or "torch 2.10.0+cpu" in said or "torch ==2.10.0+cpu" in said


@pytest.mark.parametrize("machine", list(PLATFORMS))
def test_with_pytorchs_cpu_index_torch_and_torch_npu_resolve(indexes, tmp_path, machine):
    for code, said in (
        uv(indexes, [OURS], machine, ["pytorch"]),
        pip(indexes, [OURS], machine, tmp_path, ["pytorch"]),
    ):
        assert code == 0, said
        found = pinned(said)
        assert (found["torch"], found["torch-npu"]) == ("2.10.0+cpu", "2.10.0.post4")
        assert re.fullmatch(r"0\.23\.0\+pd\.[0-9.]+\.ascend", found["vllm"])


def test_on_aarch64_the_package_index_alone_is_enough(indexes, tmp_path):
    for code, said in (uv(indexes, [OURS], "aarch64"), pip(indexes, [OURS], "aarch64", tmp_path)):
        assert code == 0, said
        assert pinned(said)["torch"] == "2.10.0"


def test_without_the_extra_no_torch_is_asked_for(indexes):
    code, said = uv(indexes, ["vllm"], "x86_64")
    assert code == 0, said
    assert "torch" not in pinned(said)


@pytest.mark.parametrize("machine", list(PLATFORMS))
def test_vllm_ascend_resolves_beside_it_with_ascends_index(indexes, tmp_path, machine):
    """Every requirement of both projects at once."""
    wanted = [OURS, "vllm-ascend==0.23.0.post1"]
    code, said = pip(indexes, wanted, machine, tmp_path, ["pytorch", "huawei"])
    assert code == 0, said
    found = pinned(said)
    assert (found["torch"], found["triton-ascend"], found["vllm-ascend"]) == ("2.10.0+cpu", "3.2.2", "0.23.0.post1")
    code, said = pip(indexes, wanted, machine, tmp_path, ["pytorch"])
    assert code != 0
    assert "triton-ascend==3.2.2" in said


def test_a_version_for_contradicting_requirements_is_not_made_up():
    from packaging.specifiers import SpecifierSet

    assert find_version([SpecifierSet(">=2"), SpecifierSet("<2")]) is None
    assert find_version([SpecifierSet("<0.124.0"), SpecifierSet(">=0.115.0")]) == "0.123"
    assert find_version([SpecifierSet("==5.5.4"), SpecifierSet("!=5.5.0,>=4.56")]) == "5.5.4"
