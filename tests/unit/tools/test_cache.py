# SPDX-License-Identifier: Apache-2.0
import hashlib
import sys

import pytest

from tools import cache
from tools.cache import CacheError, PinnedWheel, compute_digest, compute_tree_digest, fetch_wheels, publish, staging

CONTENT = b"a wheel"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
WHEEL = PinnedWheel("thing", "1.0", (DIGEST,))


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path):
    """A stand-in for `python -m pip download` that records its calls; `serve(bytes)` sets what it delivers."""
    script, calls, payload = tmp_path / "python", tmp_path / "calls", tmp_path / "payload"
    script.write_text(
        f"#!{sys.executable}\nimport pathlib, shutil, sys\n"
        f"open({str(calls)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        f"source = pathlib.Path({str(payload)!r})\n"
        "if not source.exists(): sys.exit('nothing by that name')\n"
        "shutil.copy(source, sys.argv[sys.argv.index('-d') + 1] + '/thing-1.0-py3-none-any.whl')\n"
    )
    script.chmod(0o755)

    class Index:
        python = str(script)

        def serve(self, content):
            payload.write_bytes(content)

        def num_calls(self):
            return len(calls.read_text().splitlines()) if calls.exists() else 0

    return Index()


def test_a_wheel_is_downloaded_once(index, root):
    index.serve(CONTENT)
    (path,) = fetch_wheels([WHEEL], index.python)
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(root)
    assert fetch_wheels([WHEEL], index.python) == [path]
    assert index.num_calls() == 1


def test_a_wheel_with_another_hash_is_refused_and_not_kept(index, root):
    index.serve(b"something else")
    with pytest.raises(CacheError, match=f"wanted one of {DIGEST}"):
        fetch_wheels([WHEEL], index.python)
    assert not list(root.rglob("*.whl"))


def test_a_wheel_that_changed_in_the_cache_is_fetched_again(index):
    index.serve(CONTENT)
    (path,) = fetch_wheels([WHEEL], index.python)
    path.write_bytes(b"rotten")
    assert fetch_wheels([WHEEL], index.python)[0].read_bytes() == CONTENT
    assert index.num_calls() == 2


def test_a_failed_download_says_what_pip_said(index):
    with pytest.raises(CacheError, match=r"thing==1.0(.|\n)*nothing by that name"):
        fetch_wheels([WHEEL], index.python)


def test_what_is_staged_disappears_and_what_is_published_stays(root):
    with staging(root) as folder:
        (folder / "made").mkdir()
        publish(folder / "made", root / "final")
    assert (root / "final").is_dir()
    assert [path.name for path in root.iterdir()] == ["final"]


def test_the_second_of_two_publishers_changes_nothing(root):
    (root / "final").mkdir(parents=True)
    (root / "final/first").touch()
    with staging(root) as folder:
        (folder / "made").mkdir()
        (folder / "made/second").touch()
        publish(folder / "made", root / "final")
    assert [path.name for path in (root / "final").iterdir()] == ["first"]


def test_a_digest_depends_on_where_the_parts_end():
    assert compute_digest("ab", "c") != compute_digest("a", "bc")


def test_a_tree_digest_sees_names_and_contents_and_ignores_bytecode(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("1")
    first = compute_tree_digest(tmp_path, ["src"])
    (tmp_path / "src/__pycache__").mkdir()
    (tmp_path / "src/__pycache__/a.pyc").write_text("x")
    assert compute_tree_digest(tmp_path, ["src"]) == first
    (tmp_path / "src/a.py").write_text("2")
    second = compute_tree_digest(tmp_path, ["src"])
    (tmp_path / "src/a.py").rename(tmp_path / "src/b.py")
    assert len({first, second, compute_tree_digest(tmp_path, ["src"])}) == 3


def test_the_cache_is_in_the_home_folder_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("VLLM_PD_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.get_cache_root() == tmp_path / ".cache/vllm-ascend-pd"
