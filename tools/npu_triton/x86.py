# SPDX-License-Identifier: Apache-2.0
"""Makes a library for this machine out of final HIVM: what `csrc_npu/npu/triton` runs and the stand-in launches.

The text is rewritten (`hivm_text`), bishengir-opt's upstream passes take it to the LLVM dialect, Debian's LLVM to an
object, and the system's g++ links it with the runtime. Each step's result is kept under a hash of all that went in.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tools.cache import compute_digest, compute_sha256, compute_tree_digest, publish, staging
from tools.npu_triton import hivm_text
from tools.npu_triton.env import Environment, TritonToolError, get_triton_root, run_tool
from tools.npu_triton.lowering import ROOT

RUNTIME: Final = "csrc_npu/npu/triton"
FLAGS: Final = ("-std=c++20", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread")
PASSES: Final = (
    "--lower-affine",
    "--convert-scf-to-cf",
    "--expand-strided-metadata",
    "--lower-affine",
    "--memref-expand",
    "--finalize-memref-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--reconcile-unrealized-casts",
)
LIBRARY: Final = "pd_kv.so"
VECTOR_CORES: Final = 40  # of the chip that LIBRARY's text was lowered for; any grid is right


def build_library(environment: Environment, modules: Mapping[str, str]) -> Path:
    """The library of these kernels (name -> final HIVM text); `pd_kv.json` lies beside it.

    Raises:
        TritonToolError: a tool's own words.
    """
    objects = [_build_object(environment, kernel, text) for kernel, text in sorted(modules.items())]
    runtime = _build_runtime()
    key = compute_digest(*map(str, objects), str(runtime), compute_sha256(Path(__file__)))[:24]
    final = get_triton_root() / "x86" / key
    if not final.exists():
        with staging(final.parent) as folder:
            made = folder / "made"
            made.mkdir()
            entries = made / "entries.cpp"
            macros = "".join(f"PD_SIM_KERNEL({kernel})\n" for kernel in sorted(modules))
            entries.write_text(f'#include "launch.h"\n\n{macros}')
            command: list[str | Path] = [_find_compiler(), *FLAGS, "-shared", f"-I{ROOT / RUNTIME}", entries, *objects]
            run_tool([*command, *sorted(runtime.glob("*.o")), "-o", made / LIBRARY])
            _describe(made, sorted(modules))
            publish(made, final)
    return final / LIBRARY


def _describe(folder: Path, kernels: list[str]) -> None:
    """The file that tells who launches it which kernels there are, by what they do."""
    entries = {name.removeprefix("pd_kv_"): {"file": LIBRARY, "name": name} for name in kernels}
    about = {"abi": 1, "grid": VECTOR_CORES, "kernels": entries}
    (folder / "pd_kv.json").write_text(json.dumps(about, indent=2) + "\n")


def _build_object(environment: Environment, kernel: str, text: str) -> Path:
    rewriter = compute_sha256(Path(hivm_text.__file__))
    key = compute_digest(environment.key, rewriter, kernel, text, *PASSES)[:24]
    final = get_triton_root() / "objects" / f"{key}.o"
    if not final.exists():
        with staging(final.parent) as folder:
            source, lowered, assembly = folder / "kernel.mlir", folder / "llvm.mlir", folder / "kernel.ll"
            source.write_text(hivm_text.rewrite(text, kernel))
            run_tool([environment.bishengir / "bishengir-opt", source, *PASSES, "-o", lowered])
            environment.run_llvm("mlir-translate", "--mlir-to-llvmir", lowered, "-o", assembly)
            flags = ("-O2", "-relocation-model=pic", "-filetype=obj")
            environment.run_llvm("llc", *flags, assembly, "-o", folder / "kernel.o")
            publish(folder / "kernel.o", final)
    return final


def _build_runtime() -> Path:
    key = compute_digest(*FLAGS, compute_tree_digest(ROOT, [RUNTIME]))[:24]
    final = get_triton_root() / "runtime" / key
    if not final.exists():
        with staging(final.parent) as folder:
            made = folder / "made"
            made.mkdir()
            for source in sorted((ROOT / RUNTIME).glob("*.cpp")):
                run_tool([_find_compiler(), *FLAGS, "-c", source, "-o", made / f"{source.stem}.o"])
            publish(made, final)
    return final


def _find_compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        raise TritonToolError("g++ not found: it links the kernels with their runtime")
    return found
