# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_ascend_pd.npu.build`: compile the torch_npu extension against the torch and torch_npu that are here.

The wheel of lane ascend carries the sources, not a binary: the extension depends on the Python, torch and torch_npu
that it is loaded into. It is put beside this module, where `probing.py` looks. Needs g++ with C++20 and Python's
headers, no CANN. Without it KV is moved by torch operators. Not run on an NPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vllm_ascend_pd.npu.probing import MODULE

HERE: Final = Path(__file__).parent
FLAGS: Final = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
LIBRARIES: Final = ("-ltorch_npu", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")


class BuildError(Exception):
    """The extension cannot be built here; says what is missing."""


def find_sources() -> Path:
    """The folder with `include`, `src` and `npu`: in the wheel beside this file, in a checkout `csrc_npu`.

    Raises:
        BuildError: neither is there.
    """
    for folder in (HERE / "csrc", HERE.parents[1] / "csrc_npu"):
        if (folder / "npu/module.cpp").is_file():
            return folder
    raise BuildError(f"{HERE / 'csrc'} is not there: this wheel is not of lane ascend")


def find_package(name: str) -> Path:
    """The folder of an installed package, without importing it (torch_npu needs CANN to be imported).

    Raises:
        BuildError: it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(f"{name} is not installed in {sys.prefix}")
    return Path(next(iter(spec.submodule_search_locations)))


def compose_command(sources: Path, torch: Path, torch_npu: Path, target: Path, *, cxx: str) -> list[str]:
    """The one call of the compiler."""
    python = sysconfig.get_paths()["include"]
    included = (
        torch / "include",
        torch / "include/torch/csrc/api/include",
        torch_npu / "include",
        torch_npu / "include/third_party/acl/inc",
        python,
    )
    files = [*sorted((sources / "npu").glob("*.cpp")), sources / "src/copy_plan.cpp", sources / "src/slices.cpp"]
    return [
        cxx,
        *FLAGS,
        f"-DTORCH_EXTENSION_NAME={MODULE}",
        "-D_GLIBCXX_USE_CXX11_ABI=1",  # torch has been built with it since 2.6
        *(f"-I{sources / name}" for name in ("include", "src", "npu")),
        *(word for path in included for word in ("-isystem", str(path))),
        *map(str, files),
        f"-L{torch / 'lib'}",
        f"-L{torch_npu / 'lib'}",
        *LIBRARIES,
        "-o",
        str(target),
    ]


def build(out: Path) -> Path:
    """Compile into folder `out` (minutes, 2 GB of memory); an older file is replaced in one step.

    Raises:
        BuildError: something is missing, or the compiler's words.
    """
    cxx = shutil.which(os.environ.get("CXX", "g++"))
    if cxx is None:
        raise BuildError("no g++ on PATH (or what CXX names): apt-get install g++, or dnf install gcc-c++")
    sources, torch, torch_npu = find_sources(), find_package("torch"), find_package("torch_npu")
    final = out / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pd-npu-", dir=out) as folder:
        built = Path(folder) / final.name
        command = compose_command(sources, torch, torch_npu, built, cxx=cxx)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"`{' '.join(command)}` failed:\n{done.stderr.strip()[-6000:]}")
        os.replace(built, final)
    return final


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, and print where the extension lies."""
    parser = argparse.ArgumentParser(prog="python -m vllm_ascend_pd.npu.build", description="Build the NPU extension.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder (default: the package's, where it is found)")
    try:
        print(build(parser.parse_args(arguments).out))
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
