# SPDX-License-Identifier: Apache-2.0
"""When upstream changes under an edit: the stop says edit, operation, file, release, count and what stands there."""

from __future__ import annotations

import re

import pytest

from tests.fork.builders import ADD_START, UPSTREAM, edit_text, make_repo, patch
from tools.fork.errors import AnchorLost, EditInvalid


@pytest.fixture
def repo(tmp_path):
    return make_repo(tmp_path, {"engine.edit.py": edit_text(ADD_START)})


def lost(repo, files) -> str:
    with pytest.raises(AnchorLost) as caught:
        patch(repo, files)
    text = str(caught.value)
    assert "vllm/engine.edit.py" in text
    assert "vLLM 9.9.0" in text
    return text


def test_the_edit_applies_to_what_it_was_written_for(repo):
    done = patch(repo, {"vllm/engine.py": UPSTREAM, "vllm/other.py": b"x = 1\n"})
    assert list(done.files) == ["vllm/engine.py"]
    own = b"        pd_start(self)  # ascend-pd: vllm/engine.edit.py\n"
    assert done.files["vllm/engine.py"].replace(own, b"") == UPSTREAM
    assert own in done.files["vllm/engine.py"]


def test_a_renamed_anchor_stops_and_names_the_nearest_statement(repo):
    text = lost(repo, {"vllm/engine.py": UPSTREAM.replace(b"make_cache", b"make_kv_cache")})
    assert "InsertBefore in 'Engine.start' at Call(callee='make_cache'" in text
    assert "vllm/engine.py of vLLM 9.9.0: 0 matches, want exactly 1" in text
    assert "line 14: cache = make_kv_cache(cfg)" in text


def test_a_duplicated_anchor_stops_and_shows_each(repo):
    doubled = UPSTREAM.replace(b"        return cache\n", b"        cache = make_cache(2)\n        return cache\n")
    text = lost(repo, {"vllm/engine.py": doubled})
    assert "2 matches, want exactly 1" in text
    assert "line 14: cache = make_cache(cfg)" in text
    assert "line 15: cache = make_cache(2)" in text


def test_a_scope_that_moved_to_another_file_stops_and_says_where_it_is_now(repo):
    shim = b"from vllm.core import Engine\n"
    text = lost(repo, {"vllm/engine.py": shim, "vllm/core.py": UPSTREAM, "vllm/no.py": b"class Engine:\n    pass\n"})
    assert "vllm/engine.py: does not define Engine.start" in text
    assert "Engine.start is defined now in: vllm/core.py" in text
    assert "vllm/no.py" not in text


def test_a_missing_file_stops_and_says_where_its_scope_is_now(repo):
    text = lost(repo, {"vllm/core.py": UPSTREAM})
    assert "vllm/engine.py: no such file" in text
    assert "Engine.start is defined now in: vllm/core.py" in text


def test_candidates_resolve_by_the_file_that_defines_the_scope_not_by_the_one_that_exists(tmp_path):
    text = edit_text(ADD_START, upstream='("vllm/engine.py", "vllm/core.py")')
    repo = make_repo(tmp_path, {"engine.edit.py": text})
    done = patch(repo, {"vllm/engine.py": b"from vllm.core import Engine\n", "vllm/core.py": UPSTREAM})
    assert list(done.files) == ["vllm/core.py"]
    text = lost(repo, {"vllm/engine.py": UPSTREAM, "vllm/core.py": UPSTREAM})
    assert "2 matches, want exactly 1" in text
    assert "vllm/engine.py, vllm/core.py" in text


def test_a_lost_field_names_the_nearest_field(tmp_path):
    repo = make_repo(tmp_path, {"engine.edit.py": edit_text('AddField("pd: int = 1", cls="Engine", after="sizes")')})
    text = lost(repo, {"vllm/engine.py": UPSTREAM})
    assert "AddField in class 'Engine' after field 'sizes'" in text
    assert "line 9: size: int = 3" in text


def test_removing_an_edit_gives_upstreams_bytes_back(repo):
    files = {"vllm/engine.py": UPSTREAM}
    assert patch(repo, files).files["vllm/engine.py"] != UPSTREAM
    (repo / "vllm/engine.edit.py").unlink()
    assert patch(repo, files).files == {}


def test_two_edit_files_of_one_upstream_file_build_on_each_other(repo):
    (repo / "vllm/second.edit.py").write_text(edit_text('AddImport("import pd")'))
    done = patch(repo, {"vllm/engine.py": UPSTREAM})
    text = done.files["vllm/engine.py"].decode()
    assert re.search(r"^import pd  # ascend-pd: vllm/second.edit.py$", text, re.M)
    assert re.search(r"^ +pd_start\(self\)  # ascend-pd: vllm/engine.edit.py$", text, re.M)
    assert [edit.path for edit, _, _ in done.steps] == ["vllm/engine.edit.py", "vllm/second.edit.py"]


def test_an_edit_for_other_releases_is_left_out(tmp_path):
    repo = make_repo(tmp_path, {"engine.edit.py": edit_text(ADD_START, extra='LANES = ("8.8.0",)')})
    assert patch(repo, {"vllm/engine.py": UPSTREAM}).files == {}
    assert patch(repo, {"vllm/engine.py": UPSTREAM}, release="8.8.0").files != {}


def test_keep_going_reports_the_lost_edit_and_applies_the_others(repo):
    (repo / "vllm/second.edit.py").write_text(edit_text('AddImport("import pd")'))
    changed = UPSTREAM.replace(b"make_cache", b"other")
    done = patch(repo, {"vllm/engine.py": changed}, keep_going=True)
    assert list(done.failures) == ["vllm/engine.edit.py"]
    assert done.files["vllm/engine.py"].replace(b"import pd  # ascend-pd: vllm/second.edit.py\n", b"") == changed


def test_an_edit_that_does_not_compile_in_place_stops(tmp_path):
    bad = 'InsertFirst("await pd_start(self)", scope="Engine.start")'
    repo = make_repo(tmp_path, {"engine.edit.py": edit_text(bad)})
    with pytest.raises(AnchorLost, match="does not compile") as caught:
        patch(repo, {"vllm/engine.py": UPSTREAM})
    assert "vllm/engine.edit.py" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1\n", "has no docstring"),
        ('"""Edits.\n\nKind  x\n"""\nUPSTREAM = ("vllm/a.py",)\n', "EDITS must be"),
        ('"""Edits."""\nUPSTREAM = ("a.py",)\n', "UPSTREAM must be"),
        (edit_text(ADD_START).replace("Drop when     never", "Nothing"), "does not say: Drop when"),
        (edit_text(ADD_START, extra='LANES = "9.9.0"'), "LANES must be"),
        (edit_text("1"), "EDITS must be"),
        ('"""Edits."""\nimport no_such_module_here\n', "cannot be loaded: ModuleNotFoundError"),
        ('"""Edits."""\n(\n', "line 2"),
    ],
)
def test_a_malformed_edit_file_is_refused_by_name(tmp_path, text, reason):
    repo = make_repo(tmp_path, {"engine.edit.py": text})
    with pytest.raises(EditInvalid, match=re.escape(reason)) as caught:
        patch(repo, {"vllm/engine.py": UPSTREAM})
    assert "vllm/engine.edit.py" in str(caught.value)
