# SPDX-License-Identifier: Apache-2.0
"""The metadata of the built wheel: METADATA, WHEEL, RECORD and the names. Pure: text in, text out.

The distribution is named `vllm` with a local version; upstream's `vllm/_version.py` stays as it is,
because vllm-ascend branches on `vllm.__version__`.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from collections.abc import Iterable, Sequence

from tools.fork.errors import ArtefactError, ForkError
from tools.fork.lanes import Lane

# Upstream's CPU builds pin torch to `+cpu`, which no index but PyTorch's own has, and its three companions
# are not needed to serve text: the machine's own torch of the right release is what we ask for.
DROPPED = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
# Whoever repacked upstream's wheel is not to be asked about ours.
_FOREIGN = ("Maintainer-email:", "Project-URL: Bug Tracker,")
_VERSION = re.compile(r"\d+(\.\d+)*")


def fork_version(release: str, ours: str, lane: str) -> str:
    """`0.32.0+pd.1.cpu`: upstream's release, our version, the lane, in PEP 440's normal form.

    Raises:
        ForkError: our version is not dotted numbers, which a local version needs.
    """
    if not _VERSION.fullmatch(ours):
        raise ForkError(f"vllm_ascend_pd.__version__ must be dotted numbers, is {ours!r}")
    return f"{release}+pd.{ours}.{lane.replace('-', '.')}"


def split_wheel_name(name: str) -> tuple[str, str, str]:
    """Distribution, version and tag (`cp38-abi3-manylinux_2_28_x86_64`) of a wheel's file name."""
    parts = name.removesuffix(".whl").split("-")
    if not name.endswith(".whl") or len(parts) not in (5, 6):
        raise ArtefactError(f"{name}: is not the name of a wheel")
    return parts[0], parts[1], "-".join(parts[-3:])


def glibc_of_tag(tag: str) -> tuple[str, tuple[int, int] | None]:
    """The machine of a wheel's tag and the oldest glibc that it promises to load on; None where it names none.

    Raises:
        ForkError: a tag for any machine, or for another system than Linux with glibc.
    """
    found = []
    for platform in tag.split("-")[2].split("."):
        match = re.fullmatch(
            r"(?:manylinux_(\d+)_(\d+)|(manylinux1|manylinux2010|manylinux2014)|linux)_(\w+)", platform
        )
        if match is None:
            raise ForkError(f"tag {tag}: the wheel holds a library, so want manylinux_X_Y_MACHINE, not {platform!r}")
        legacy = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
        found.append((match[4], (int(match[1]), int(match[2])) if match[1] else legacy.get(match[3] or "")))
    machines = {machine for machine, _ in found}
    if len(machines) != 1:
        raise ForkError(f"tag {tag}: names several machines, and a library is for one")
    return found[0][0], min((glibc for _, glibc in found if glibc is not None), default=None)


def project_of(requirement: str) -> str:
    """The normalised project name of a requirement."""
    found = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", requirement)
    if found is None:
        raise ArtefactError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", found[1]).lower()


def new_metadata(text: str, lane: Lane, *, version: str, ours: Iterable[str], licenses: Sequence[str]) -> str:
    """Upstream's METADATA as that of the fork.

    Args:
        text: upstream's METADATA.
        lane: which torch, Pythons and extras it asks for.
        version: the fork's version.
        ours: what `vllm_ascend_pd` needs at run time; what upstream requires already stays upstream's.
        licenses: our licence files, relative to `licenses/` in the metadata folder.
    """
    head, _, body = text.replace("\r\n", "\n").partition("\n\n")
    lines = []
    for line in head.splitlines():
        if line.startswith("Name:"):
            line = "Name: vllm"
        elif line.startswith("Version:"):
            line = f"Version: {version}"
        elif line.startswith("Requires-Python:") and lane.requires_python:
            line = f"Requires-Python: {lane.requires_python}"
        elif line.startswith(_FOREIGN) or project_of_line(line) in DROPPED or not _fits_python(line, lane):
            continue
        lines.append(line)
    present = {project_of_line(line) for line in lines if "extra ==" not in line}
    optional = {project_of(r) for requirements in lane.extras.values() for r in requirements}
    added = [] if "torch" in optional else [f"torch=={lane.torch}"]
    added += [r for r in ours if project_of(r) not in present]
    _insert(lines, "Requires-Dist:", [f"Requires-Dist: {r}" for r in added])
    _insert(lines, "License-File:", [f"License-File: {name}" for name in licenses])
    for extra, requirements in lane.extras.items():
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {r}; extra == "{extra}"' for r in requirements)]
    return "\n".join(lines) + "\n\n" + body


def _fits_python(line: str, lane: Lane) -> bool:
    """Whether a line is no classifier of a Python that the lane does not take (`3.13` where `<3.13`)."""
    named = re.fullmatch(r"Classifier: Programming Language :: Python :: 3\.(\d+)", line)
    below = re.search(r"<3\.(\d+)", lane.requires_python or "")
    return named is None or below is None or int(named[1]) < int(below[1])


def project_of_line(line: str) -> str | None:
    """The project that a `Requires-Dist:` line asks for; None for another line."""
    return project_of(line.partition(":")[2]) if line.startswith("Requires-Dist:") else None


def _insert(lines: list[str], header: str, new: list[str]) -> None:
    """Behind the last unconditional line of the same header, else at the end."""
    at = [i for i, line in enumerate(lines) if line.startswith(header) and "extra ==" not in line]
    place = at[-1] + 1 if at else len(lines)
    lines[place:place] = new


def new_wheel_file(text: str, tag: str) -> str:
    """Upstream's WHEEL with the tag of the file name (upstream's own names one CPython and no manylinux)."""
    pythons, abis, platforms = (part.split(".") for part in tag.split("-"))
    tags = [f"Tag: {p}-{a}-{m}" for p in pythons for a in abis for m in platforms]
    kept = [line for line in text.splitlines() if line.strip() and not line.startswith(("Tag:", "Generator:"))]
    return "\n".join([*kept[:1], "Generator: vllm-ascend-pd (tools.fork)", *kept[1:], *tags]) + "\n"


def record_row(name: str, data: bytes) -> tuple[str, str, str]:
    """One row of RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return name, f"sha256={digest}", str(len(data))


def record_text(rows: Iterable[tuple[str, str, str]], record: str) -> str:
    """RECORD, which lists itself without a hash."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([*rows, (record, "", "")])
    return out.getvalue()
