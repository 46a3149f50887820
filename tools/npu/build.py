# SPDX-License-Identifier: Apache-2.0
"""Compile the stand-in for libascendcl, the extension and the tests' kernel object; each once per hash of its inputs.

The system's g++ compiles: the extension needs torch's C++ ABI. One object per source (so a change costs one compile),
objects and libraries lie in the cache folder under the hash of everything that went in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.cache import compute_digest, compute_sha256, publish, staging
from tools.npu.env import Environment, NpuBuildError, get_npu_root, locked
from tools.npu.stubs import write_stubs

ROOT: Final = Path(__file__).resolve().parent.parent.parent
STANDIN: Final = ROOT / "tools/npu/standin"
EXTENSION: Final = ROOT / "csrc_npu/npu"
CORE: Final = ROOT / "csrc_npu"
MODULE: Final = "_pd_npu"
FLAGS: Final = ("-std=c++20", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-pthread")
TORCH_SOURCES: Final = ("queue.cpp", "module.cpp")  # they include torch's headers: a minute each
PLAIN_SOURCES: Final = ("npu/transfer.cpp", "npu/kernel.cpp", "npu/table.cpp", "src/copy_plan.cpp", "src/slices.cpp")


@dataclass(frozen=True)
class Built:
    """Folders of what was built."""

    standin: Path  # for LD_LIBRARY_PATH
    extension: Path  # holds _pd_npu.so
    defective: Path  # the same with switches that break it, for the tests
    kernels: Path  # holds pd_kv.so and pd_kv.json, a kernel "binary" for this machine


@dataclass(frozen=True)
class Compiler:
    """The system's g++ and what its objects depend on."""

    path: str
    version: str

    @staticmethod
    def find() -> Compiler:
        """Raises NpuBuildError when there is none."""
        path = shutil.which(os.environ.get("CXX", "g++"))
        if path is None:
            raise NpuBuildError(
                "no g++ on PATH (or what CXX names): the torch_npu extension and the stand-in are compiled with the "
                "system's compiler. Install it (Debian: `apt-get install g++`) and run this again."
            )
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        return Compiler(path, done.stdout.splitlines()[0] if done.stdout else "unknown")

    def run(self, arguments: Sequence[str]) -> None:
        """Compile or link; raises NpuBuildError with the compiler's words."""
        command = ["nice", "-n", "10", self.path, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NpuBuildError(f"`{' '.join(command)}` failed:\n{done.stderr.strip()[-6000:]}")

    def compile_object(self, source: Path, flags: Sequence[str], headers: Iterable[Path]) -> Path:
        """The object of one source, from the cache or compiled now."""
        inputs = [source, *sorted(headers)]
        key = compute_digest(self.version, *flags, *(compute_sha256(path) for path in inputs))[:24]
        final = get_npu_root() / "objects" / key
        if not (final / "object.o").exists():
            started = time.monotonic()
            with staging(final.parent) as folder:
                self.run([*flags, "-c", str(source), "-o", str(folder / "object.o")])
                publish(folder, final)
            print(f"[npu] compiled {source.name}: {time.monotonic() - started:.0f} s", flush=True)
        return final / "object.o"


def build_all(environment: Environment) -> Built:
    """Everything that the tests need; seconds when nothing changed."""
    compiler = Compiler.find()
    with locked("build"):
        standin = build_standin(compiler, environment)
        kernels = build_kernels(compiler)
        extension, defective = build_extensions(compiler, environment)
    return Built(standin, extension, defective, kernels)


def get_torch_npu(environment: Environment) -> Path:
    """The folder of the installed torch_npu package."""
    return environment.packages / "torch_npu"


def build_standin(compiler: Compiler, environment: Environment) -> Path:
    """The folder with libascendcl.so and the libraries around it."""
    torch_npu = get_torch_npu(environment)
    flags = [*FLAGS, "-fvisibility=default", "-isystem", str(torch_npu / "include/third_party/acl/inc")]
    headers = list(STANDIN.glob("*.h"))
    names = ("streams.cpp", "memory.cpp", "launch.cpp", "runtime.cpp", "op_compiler.cpp")
    objects = {name: compiler.compile_object(STANDIN / name, flags, headers) for name in names}
    stubs_source = compute_sha256(ROOT / "tools/npu/stubs.py")
    key = compute_digest(environment.key, compiler.version, stubs_source, *map(str, objects.values()))[:24]
    final = get_npu_root() / "standin" / key
    if final.exists():
        return final
    with staging(final.parent) as folder:
        parts = [str(path) for name, path in objects.items() if name != "op_compiler.cpp"]
        acl = folder / "libascendcl.so"
        compiler.run(["-shared", "-pthread", *parts, "-Wl,-soname,libascendcl.so", "-ldl", "-o", str(acl)])
        linked = ["-Wl,--no-as-needed", f"-L{folder}", "-lascendcl"]
        op_compiler = str(objects["op_compiler.cpp"])
        _link(compiler, folder / "libacl_op_compiler.so", [op_compiler, *linked])
        stubs = write_stubs(torch_npu, (acl, folder / "libacl_op_compiler.so"), folder / "stubs.cpp")
        _link(compiler, folder / "libge_runner.so", ["-fPIC", str(stubs), *linked])
        for name in ("hccl", "graph", "acl_tdt_channel"):
            _link(compiler, folder / f"lib{name}.so", ["-fPIC", "-xc++", "/dev/null"])
        publish(folder, final)
    return final


def _link(compiler: Compiler, target: Path, inputs: Sequence[str]) -> None:
    compiler.run(["-shared", f"-Wl,-soname,{target.name}", *inputs, "-o", str(target)])


def build_kernels(compiler: Compiler) -> Path:
    """The hand-written kernel object for this machine, with its description."""
    source, description = STANDIN / "kernel_x86.cpp", STANDIN / "pd_kv.json"
    flags = [*FLAGS, "-fvisibility=default", f"-I{EXTENSION}"]
    built = compiler.compile_object(source, flags, EXTENSION.glob("*.h"))
    key = compute_digest(str(built), compute_sha256(description))[:24]
    final = get_npu_root() / "kernels" / key
    if not final.exists():
        with staging(final.parent) as folder:
            compiler.run(["-shared", str(built), "-o", str(folder / "pd_kv.so")])
            shutil.copy(description, folder / "pd_kv.json")
            publish(folder, final)
    return final


def build_extensions(compiler: Compiler, environment: Environment) -> tuple[Path, Path]:
    """The extension as it ships, and the one whose defects a test can switch on."""
    torch, torch_npu = environment.packages / "torch", get_torch_npu(environment)
    acl = ["-isystem", str(torch_npu / "include/third_party/acl/inc")]
    ours = [f"-I{CORE / 'include'}", f"-I{EXTENSION}", f"-I{CORE / 'src'}"]
    included = (torch / "include", torch / "include/torch/csrc/api/include", torch_npu / "include")
    python = Path(sysconfig.get_paths()["include"])
    quick = [flag for flag in FLAGS if flag not in ("-O2", "-g1")]  # glue only; optimising it doubles the time
    heavy = [*quick, "-O1", *ours, *acl, *(x for path in (*included, python) for x in ("-isystem", str(path)))]
    heavy += [f"-DTORCH_EXTENSION_NAME={MODULE}", "-D_GLIBCXX_USE_CXX11_ABI=1"]
    headers = [*EXTENSION.glob("*.h"), *(CORE / "include/pd").glob("co*.h"), *(CORE / "src").glob("*.h")]
    headers.append(CORE / "include/pd/check.h")
    queue_headers = [EXTENSION / "queue.h"]
    jobs = [(EXTENSION / "queue.cpp", heavy, queue_headers), (EXTENSION / "module.cpp", heavy, headers)]
    for defect in ([], ["-DPD_NPU_DEFECTS"]):
        jobs += [(CORE / name, [*FLAGS, *ours, *acl, *defect], headers) for name in PLAIN_SOURCES]
    with ThreadPoolExecutor(2) as pool:  # two: a torch source takes 1.5 GB
        objects = list(pool.map(lambda job: compiler.compile_object(*job), jobs))
    shared, plain = objects[: len(TORCH_SOURCES)], objects[len(TORCH_SOURCES) :]
    half = len(PLAIN_SOURCES)
    libraries = [f"-L{torch / 'lib'}", f"-L{torch_npu / 'lib'}", "-ltorch_npu", "-lc10", "-ltorch_cpu", "-ltorch"]
    libraries.append("-ltorch_python")
    return (
        _link_extension(compiler, [*shared, *plain[:half]], libraries),
        _link_extension(compiler, [*shared, *plain[half:]], libraries),
    )


def _link_extension(compiler: Compiler, objects: Sequence[Path], libraries: Sequence[str]) -> Path:
    final = get_npu_root() / "extensions" / compute_digest(*map(str, objects), *libraries)[:24]
    if not final.exists():
        with staging(final.parent) as folder:
            target = folder / f"{MODULE}.so"
            compiler.run(["-shared", *map(str, objects), *libraries, "-o", str(target)])
            publish(folder, final)
    return final
