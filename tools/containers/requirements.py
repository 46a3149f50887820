# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.containers.requirements WHEEL [EXTRA]`: what a wheel asks for, as pip's requirements.

They go into a layer of their own, under our wheel's: a new version of ours then moves 150 MB, not gigabytes. Runs in
the stage that builds the wheel; the standard library is all there is.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import Parser
from pathlib import Path
from typing import Final

_EXTRA: Final = re.compile(r"""extra\s*==\s*['"]([\w.-]+)['"]""")


def iter_requirements(metadata: str, extra: str = "") -> Iterator[str]:
    """The lines that hold without an extra, and those of this extra (their condition removed, others kept)."""
    for line in Parser().parsestr(metadata, headersonly=True).get_all("Requires-Dist") or ():
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        match = _EXTRA.search(marker)
        if match is None:
            yield line
        elif match[1] == extra:
            rest = " and ".join(part for part in marker.split(" and ") if not _EXTRA.search(part))
            yield f"{requirement}; {rest}" if rest else requirement


def read_metadata(wheel: Path) -> str:
    """The METADATA file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return archive.read(name).decode()


def main(arguments: Sequence[str]) -> int:
    """Print them, sorted, so that the same needs make the same file."""
    wheel, extra = Path(arguments[0]), arguments[1] if len(arguments) > 1 else ""
    print("\n".join(sorted(iter_requirements(read_metadata(wheel), extra))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
