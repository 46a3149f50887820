# SPDX-License-Identifier: Apache-2.0
"""Materialise the patched tree as a git repository, for reading and debugging; and print it as a diff.

One commit holds upstream as released, one each edit file, one our new modules. Compiled libraries stay
out (they are the same, and large).
"""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tools.fork.delta import REPO, EditFile, load_edits, new_modules, package_files
from tools.fork.errors import ForkError
from tools.fork.patch import Patched, patch_tree
from tools.fork.source import UpstreamTree

_COMPILED = (".so", ".pyc", ".a")
# A fixed author and date: the same inputs give the same commit ids.
_GIT_ENV = {
    "GIT_AUTHOR_NAME": "vllm-ascend-pd",
    "GIT_AUTHOR_EMAIL": "fork@localhost",
    "GIT_COMMITTER_NAME": "vllm-ascend-pd",
    "GIT_COMMITTER_EMAIL": "fork@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


def materialise(tree: UpstreamTree, out: Path, repo: Path = REPO) -> Patched:
    """Write the patched tree into `out` (replaced when it is an earlier result of this function).

    Raises:
        AnchorLost: an edit does not apply; `out` is untouched then.
        ForkError: `out` holds something else.
    """
    done = patch_tree(tree, load_edits(repo))
    if out.exists() and any(out.iterdir()):
        if not (out / ".git" / "vllm-pd-tree").is_file():
            raise ForkError(f"--out {out}: exists and was not made by `tools.fork apply`; remove it first")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    _git(out, "init", "-q", "-b", "fork")
    (out / ".git" / "vllm-pd-tree").touch()
    files = [n for n in tree.names() if n.startswith("vllm/") and not n.endswith(_COMPILED)]
    _commit(out, {n: tree.read(n) or b"" for n in files}, f"vLLM {tree.release} as released\n\nFrom {tree.label}.")
    for edit, path, data in done.steps:
        _commit(out, {path: data}, commit_message(edit))
    added = {**new_modules(repo), **package_files(repo)}
    _commit(out, added, "Add the new modules and vllm_ascend_pd")
    return done


def commit_message(edit: EditFile) -> str:
    """The edit file's docstring, its path first."""
    return f"{edit.path}: {edit.summary}\n\n{edit.doc.partition(chr(10))[2].strip()}\n"


def _commit(out: Path, files: dict[str, bytes], message: str) -> None:
    for name, data in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    _git(out, "add", "--all", "--force", ".")
    _git(out, "commit", "-q", "--allow-empty", "--no-verify", "--cleanup=whitespace", "-F", "-", text=message)


def _git(out: Path, *args: str, text: str | None = None) -> None:
    command = ["git", "-c", "core.autocrlf=false", "-c", "gc.auto=0", "-c", "commit.gpgsign=false", *args]
    try:
        done = subprocess.run(
            command, cwd=out, input=text, env={**os.environ, **_GIT_ENV}, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise ForkError("git is not installed; `apply` needs it") from None
    if done.returncode:
        raise ForkError(f"git {args[0]} in {out} failed: {done.stderr.strip()}")


def diff_lines(tree: UpstreamTree, repo: Path = REPO, *, num_context: int = 3) -> Iterator[str]:
    """The unified diff of all edits against upstream, file by file."""
    done = patch_tree(tree, load_edits(repo))
    for path, data in sorted(done.files.items()):
        before = (tree.read(path) or b"").decode().splitlines(keepends=True)
        after = data.decode().splitlines(keepends=True)
        yield from difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", n=num_context)
