# SPDX-License-Identifier: Apache-2.0
"""Development aid: the delta in place over an installed vLLM, so that an edit can be tried in seconds.

Originals are kept below `vllm/.pd-pristine/` and every run starts from them, so it can be run again after
each change. Files are replaced, never written into, because an installer may share their inodes
with its cache. What users install is the wheel of `wheel.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from tools.fork.delta import PACKAGE, REPO, load_edits, new_modules
from tools.fork.errors import ForkError
from tools.fork.lanes import load_lanes
from tools.fork.patch import Patched, patch_tree
from tools.fork.payload import MARK
from tools.fork.source import MemoryTree

PRISTINE = "vllm/.pd-pristine"
STATE = "state.json"
_DIST_INFO = re.compile(r"vllm(?:_cpu)?-(\d[^+-]*)(?:\+[^-]*)?\.dist-info")


def overlay(site: Path, repo: Path = REPO, *, remove: bool = False, keep_going: bool = False) -> Patched:
    """Undo the last overlay of `site`, then (unless `remove`) apply all current edits and link our modules.

    Raises:
        ForkError: `site` holds no vLLM of a lane, or a file there was changed by somebody else.
        AnchorLost: an edit does not apply; `site` is pristine then.
    """
    site = site.resolve()
    release = installed_release(site)
    known = sorted({lane.release for lane in load_lanes(repo).values()})
    if release not in known:
        raise ForkError(f"--site {site}: holds vLLM {release}; the lanes have: {', '.join(known)}")
    _restore(site)
    if remove:
        return Patched()
    edits = load_edits(repo)
    candidates = {name for edit in edits for name in edit.upstream}
    sources = {n: (site / n).read_bytes() for n in sorted(candidates) if (site / n).is_file()}
    done = patch_tree(MemoryTree(sources, release), edits, keep_going=keep_going)
    links = [*new_modules(repo), PACKAGE]
    taken = [name for name in links if os.path.lexists(site / name) and not (site / name).is_symlink()]
    if taken:
        raise ForkError(f"--site {site}: these new paths exist there already: {', '.join(taken)}")
    state = {"edited": {n: hashlib.sha256(d).hexdigest() for n, d in done.files.items()}, "links": links}
    for name in done.files:
        _replace(site / PRISTINE / name, sources[name])
    _replace(site / PRISTINE / STATE, json.dumps(state, indent=1).encode())
    for name, data in done.files.items():
        _replace(site / name, data)
    for name in links:
        target = site / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.symlink_to(repo / name)
    return done


def installed_release(site: Path) -> str:
    """The upstream release of the vLLM in a site-packages folder, by its metadata.

    Raises:
        ForkError: none, or more than one.
    """
    found = [m[1] for p in site.glob("vllm*.dist-info") if (m := _DIST_INFO.fullmatch(p.name))]
    if len(found) != 1 or not (site / "vllm" / "__init__.py").is_file():
        raise ForkError(f"--site {site}: holds {len(found)} installed vLLM distributions, want 1")
    return found[0]


def _restore(site: Path) -> None:
    """Put back what the last overlay changed; a file that is neither ours nor marked stays as it is."""
    kept = site / PRISTINE
    if not (kept / STATE).is_file():
        return
    state = json.loads((kept / STATE).read_bytes())
    for name, edited in state["edited"].items():
        now = (site / name).read_bytes() if (site / name).is_file() else b""
        if hashlib.sha256(now).hexdigest() == edited:
            _replace(site / name, (kept / name).read_bytes())
        elif MARK.encode() in now:
            raise ForkError(
                f"{site / name}: was changed by hand after the overlay; its original is {kept / name}: "
                f"copy it back, then run overlay again"
            )
    for name in state["links"]:
        if (site / name).is_symlink():
            (site / name).unlink()
    (kept / STATE).unlink()


def _replace(path: Path, data: bytes) -> None:
    """Write a file anew next to its place, then move it there: never into a shared inode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.pd-new")
    aside.write_bytes(data)
    aside.replace(path)
