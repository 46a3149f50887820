# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend's sdist by hash, and both packages (it and vLLM) as one tree of Python modules in memory."""

from __future__ import annotations

import tarfile
from functools import lru_cache
from pathlib import Path
from typing import Final

from tools.ascend.modules import Modules
from tools.fork.cache import require
from tools.fork.index import Index
from tools.fork.lanes import Artefact, get_lane
from tools.fork.releases import target_of_lane

RELEASE: Final = "0.23.0.post1"
SDIST: Final = Artefact(
    "vllm-ascend",
    f"vllm_ascend-{RELEASE}.tar.gz",
    "a3b9f4a5dd7aa50c37e03d1f35937c4ae5aeacc49b734cac74d59ce5757738e1",
)
LANE: Final = "ascend"


def read_python(path: Path, package: str) -> dict[str, bytes]:
    """The Python files of one package in an sdist, by their path below its one folder."""
    found = {}
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if member.isfile() and name.startswith(f"{package}/") and name.endswith(".py"):
                stream = archive.extractfile(member)
                assert stream is not None
                found[name] = stream.read()
    return found


@lru_cache(maxsize=1)
def load_modules(index: Index | None = None) -> Modules:
    """vllm-ascend and the vLLM that lane ascend starts from (our edits change no class's or function's name).

    Raises:
        ArtefactError: an sdist is not in the cache and cannot be fetched.
    """
    upstream = target_of_lane(get_lane(LANE)).open(index)
    files = {name: data for name in upstream.names() if name.endswith(".py") and (data := upstream.read(name))}
    return Modules({**files, **read_python(require(SDIST, index), "vllm_ascend")})
