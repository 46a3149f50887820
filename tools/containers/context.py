# SPDX-License-Identifier: Apache-2.0
"""What an image build sees of this repository: the tracked files that .dockerignore lets through."""

from __future__ import annotations

import fnmatch
import shutil
import subprocess
from pathlib import Path, PurePosixPath

from tools.cache import compute_digest, compute_sha256


def read_ignore(text: str) -> list[str]:
    """The patterns of a .dockerignore, in order."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def is_sent(name: str, patterns: list[str]) -> bool:
    """Whether a file goes into the context: the last pattern that matches it, or a folder above it, decides."""
    path = PurePosixPath(name)
    candidates = [name, *(str(parent) for parent in path.parents if str(parent) != ".")]
    sent = True
    for pattern in patterns:
        negated = pattern.startswith("!")
        wanted = pattern.lstrip("!").strip("/")
        shapes = {wanted, wanted.removeprefix("**/")}  # "**/x" is any depth, none included
        if any(fnmatch.fnmatchcase(one, shape) for one in candidates for shape in shapes):
            sent = negated
    return sent


def list_context(root: Path) -> list[str]:
    """Tracked files of the repository that go into the context, sorted."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, stdout=subprocess.PIPE, check=True).stdout.decode()
    patterns = read_ignore((root / ".dockerignore").read_text())
    return [name for name in sorted(listed.split("\0")) if name and (root / name).is_file() and is_sent(name, patterns)]


def copy_context(root: Path, target: Path) -> None:
    """The files, with their modes."""
    for name in list_context(root):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target / name, follow_symlinks=False)


def compute_context_digest(root: Path, under: str = "") -> str:
    """Changes when a file of the context under this folder changes."""
    names = [name for name in list_context(root) if name.startswith(under)]
    return compute_digest(*(f"{name}={compute_sha256(root / name)}" for name in names))
