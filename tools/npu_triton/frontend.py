# SPDX-License-Identifier: Apache-2.0
"""Runs inside the environment: compiles one kernel with triton-ascend's own passes to what bishengir-compile reads.

`python frontend.py KERNELS.py KERNEL TARGET ROWS COLS OUT`. Standard library and triton only.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any


def load_module(path: Path) -> Any:
    """The kernels' module, loaded by its path, so that nothing else of the package is imported."""
    spec = importlib.util.spec_from_file_location("triton_kernels", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def lower(module: Any, name: str, arch: str, sides: tuple[int, int]) -> str:
    """MLIR text (linalg) of a kernel with its tile's sides."""
    kernels = module.load_kernels()
    ir = importlib.import_module("triton._C.libtriton").ir
    ascend = importlib.import_module("triton.backends.ascend.compiler")
    compiler = importlib.import_module("triton.compiler.compiler")

    target = importlib.import_module("triton.backends.compiler").GPUTarget("npu", arch, 0)
    backend = compiler.make_backend(target)
    constants = dict(zip(("ROWS", "COLS"), sides, strict=True))
    source = compiler.ASTSource(fn=kernels[name], signature=dict(module.SIGNATURE), constants=constants)
    options = backend.parse_options(dict(source.parse_options()))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    built = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    about = {"hash": "none", "target": target, **options.__dict__}
    built = ascend.make_ttir(built, about, options)
    text, _ = ascend._parse_linalg_metadata(ascend.ttir_to_linalg(built, about, options, named_ops=True), about)
    return str(text)


def main() -> int:
    """The command line."""
    path, name, arch, rows, cols, out = sys.argv[1:]
    try:
        text = lower(load_module(Path(path)), name, arch, (int(rows), int(cols)))
    except subprocess.CalledProcessError as error:
        print(error.stderr.decode() if error.stderr else error, file=sys.stderr)
        return 1
    Path(out).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
