# SPDX-License-Identifier: Apache-2.0
"""The real delta on the real lanes: every edit applies, and only where it is meant to. Needs the cache."""

from __future__ import annotations

import re
import zipfile

import pytest

from tests.fork.builders import make_repo, record_faults
from tools.fork import ReplaceCallee
from tools.fork.__main__ import main
from tools.fork.cache import require
from tools.fork.check import check_tree
from tools.fork.delta import REPO, load_edits
from tools.fork.errors import ArtefactError, ForkError
from tools.fork.lanes import get_lane, load_lanes
from tools.fork.patch import patch_tree
from tools.fork.payload import MARK
from tools.fork.releases import target_of_lane
from tools.fork.wheel import build_wheel
from tools.native.building import build

LANES = ("cpu", "ascend", "ascend-cpu")


@pytest.fixture(scope="module")
def trees():
    """Opened lanes by name, each once; a lane that is not in the cache skips its tests."""
    opened = {}

    def open_lane(name):
        if name not in opened:
            try:
                opened[name] = target_of_lane(get_lane(name)).open(None)
            except ArtefactError as error:
                pytest.skip(f"run `python -m tools.fork fetch` first: {error}")
        return opened[name]

    return open_lane


@pytest.mark.parametrize("name", LANES)
def test_every_edit_applies_to_the_lane(trees, name):
    column = check_tree(trees(name), load_edits(), name)
    assert column.problems == []
    assert set(column.cells.values()) <= {"ok", "–"}


@pytest.mark.parametrize("name", LANES)
def test_lines_without_our_mark_are_upstreams(trees, name):
    tree = trees(name)
    edits = [edit for edit in load_edits() if edit.applies_to(tree.release)]
    replaced = 0
    for path, edited in patch_tree(tree, edits).files.items():
        before = (tree.read(path) or b"").decode().splitlines()
        after = edited.decode().splitlines()
        ours = [line for line in after if MARK in line]
        assert ours
        kept = [line for line in after if MARK not in line]
        rest = iter(before)
        assert all(any(line == other for other in rest) for line in kept), path  # a subsequence, in order
        replaced += len(before) - len(kept)
    assert replaced == sum(isinstance(op, ReplaceCallee) for edit in edits for op in edit.ops)


def test_lanes_are_pinned_and_one_artefact_serves_each_machine():
    lanes = load_lanes()
    assert tuple(lanes) == LANES
    for lane in lanes.values():
        for machine in ("x86_64", "aarch64"):
            artefact = lane.artefact(machine)
            assert lane.release in artefact.name
            assert artefact.name.endswith(".tar.gz") or machine in artefact.name
    with pytest.raises(ForkError, match="no artefact for machine 'riscv64'; it has: aarch64, x86_64"):
        lanes["cpu"].artefact("riscv64")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('torch = "2.0"', "", "lane 'cpu': torch must be a non-empty text"),
        ("0" * 64, "0" * 63, "artefact 'any': sha256 is no sha256"),
        ("[lane.cpu.artefact.any]", "[lane.cpu.other]", "has no artefact"),
        ("[lane.cpu]", "[lane.cpu", "UPSTREAM.toml"),
        ('torch = "2.0"', 'torch = "2.0"\nnpu = "yes"', "lane 'cpu': npu must be true or false, is 'yes'"),
        ('torch = "2.0"', 'torch = "2.0"\nextras = {a = "b"}', "extras: 'a' must be a list of requirements, is 'b'"),
        ('torch = "2.0"', 'torch = "2.0"\nrequires_python = 3', "requires_python must be a non-empty text"),
    ],
)
def test_a_malformed_lane_names_lane_and_field(tmp_path, old, new, message):
    repo = make_repo(tmp_path, {})
    path = repo / "vllm/UPSTREAM.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ForkError, match=re.escape(message)):
        load_lanes(repo)


def test_the_real_wheel_is_whole(tmp_path):
    lane = get_lane("cpu")
    try:
        artefact = require(lane.artefact(), None)
    except ForkError as error:
        pytest.skip(str(error))
    ours = {p.relative_to(REPO).as_posix() for p in (REPO / "vllm_ascend_pd").rglob("*.py")}
    libraries = {name: path.read_bytes() for name, path in build().items()}
    wheel = build_wheel(lane, artefact, tmp_path, libraries)
    assert re.fullmatch(r"vllm-0\.32\.0\+pd\.[0-9.]+\.cpu-cp38-abi3-manylinux_2_28_\w+\.whl", wheel.name)
    assert record_faults(wheel) == []
    with zipfile.ZipFile(wheel) as now, zipfile.ZipFile(artefact) as was:
        names = set(now.namelist())
        assert now.read("vllm/_version.py") == was.read("vllm/_version.py")
        assert {n for n in was.namelist() if n.startswith("vllm/") and not n.endswith((".pyc", "/"))} <= names
        assert ours <= names
        assert "vllm_ascend_pd/native/libpd_host.so" in names
        text = now.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
    requires = [line.split(": ", 1)[1] for line in text.splitlines() if line.startswith("Requires-Dist:")]
    assert [r for r in requires if re.match(r"torch(vision|audio|codec)?\b(?!-)", r)] == [f"torch=={lane.torch}"]
    assert not [r for r in requires if "+" in r]


def test_errors_are_one_message_with_an_exit_code(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_PD_CACHE", str(tmp_path))
    assert main(["wheel", "--lane", "ascend", "--offline"]) == 1
    assert main(["wheel", "--lane", "nothing"]) == 1
    assert main(["fetch", "--offline"]) == 1
    assert main(["diff", "--lane", "cpu", "--release", "0.32.0", "--offline"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("error: ") for line in lines)
    assert "vllm-0.23.0.tar.gz is not in the cache" in lines[0]
    assert "'nothing' is not one of: cpu, ascend, ascend-cpu" in lines[1]
    assert "offline" in lines[2]
    assert "--lane 'cpu' and --release '0.32.0' exclude each other" in lines[3]


def test_list_prints_every_edit_file(capsys):
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(edit.path in shown for edit in load_edits())
