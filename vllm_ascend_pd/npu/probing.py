# SPDX-License-Identifier: Apache-2.0
"""Which backend moves KV on this host, found by looking, and why not a better one.

Looks for files and installed packages only; nothing is imported, so a host without an NPU never loads torch_npu.
"""

from __future__ import annotations

import enum
import functools
import importlib.machinery
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_ascend_pd.errors import PDConfigError

MODULE: Final = "_pd_npu"
EXTENSION_VARIABLE: Final = "VLLM_PD_NPU_EXTENSION"  # a folder that holds the extension
KERNEL_VARIABLE: Final = "VLLM_PD_NPU_KERNEL"  # the description of kernel binaries, which lie beside it; empty: none
BACKEND_VARIABLE: Final = "VLLM_PD_NPU_BACKEND"  # forces one of Backend's values
KERNEL_ABI: Final = 1
ROLES: Final = ("extract", "inject", "extract_pieces", "inject_pieces")  # in the order of csrc_npu/npu/kernel.h


class Backend(enum.Enum):
    """Best first."""

    EXTENSION_KERNEL = "extension+kernel"  # one queue entry, one launch, one event
    EXTENSION_MEMCPY = "extension+memcpy"  # one queue entry, merged copies, one event
    TRITON = "triton"  # one launch through Triton's own launcher
    TORCH = "torch"  # torch operators, per tensor


@dataclass(frozen=True)
class Kernel:
    """The device kernels and what their description says."""

    description: Path
    entries: tuple[tuple[str, str], ...]  # (binary, function) for each of ROLES; empty where there is none
    grid: int  # vector cores


@dataclass(frozen=True)
class Found:
    """What a device tensor is moved with here."""

    backend: Backend
    reasons: tuple[str, ...]  # why nothing better
    extension: Path | None = None
    kernel: Kernel | None = None


def find_extension() -> Path | None:
    """The extension's file: in the folder that the variable names, else beside this module."""
    configured = os.environ.get(EXTENSION_VARIABLE)
    folder = Path(configured) if configured else Path(__file__).parent
    for suffix in (".so", *importlib.machinery.EXTENSION_SUFFIXES):
        if (path := folder / f"{MODULE}{suffix}").exists():
            return path
    return None


def read_kernel(description: Path) -> Kernel:
    """Read `{"abi": 1, "grid": 40, "kernels": {"extract": {"file": F, "name": N}, "inject": …}}`.

    Raises:
        PDConfigError: it is missing, of another ABI, or names a file that is not there.
    """
    try:
        fields = json.loads(description.read_text())
        abi, grid = fields["abi"], int(fields["grid"])
        named = {role: (description.parent / str(k["file"]), str(k["name"])) for role, k in fields["kernels"].items()}
        entries = tuple((str(named[role][0]), named[role][1]) if role in named else ("", "") for role in ROLES)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PDConfigError(f"{KERNEL_VARIABLE}: {description} does not describe kernels: {error!r}") from error
    if abi != KERNEL_ABI:
        raise PDConfigError(f"{KERNEL_VARIABLE}: {description} has abi {abi!r}, this version wants {KERNEL_ABI}")
    for role, (file, _) in named.items():
        if not file.exists():
            raise PDConfigError(f"{KERNEL_VARIABLE}: {description} names {file} for {role}, which does not exist")
    missing = [role for role in ROLES[:2] if role not in named]
    if missing:
        raise PDConfigError(f"{KERNEL_VARIABLE}: {description} has no kernel for {missing[0]}")
    return Kernel(description, entries, grid)


def find_kernel() -> Kernel | None:
    """The kernels that the variable names, else those shipped beside this module.

    Raises:
        PDConfigError: the variable names something that describes no kernels.
    """
    configured = os.environ.get(KERNEL_VARIABLE)
    if configured == "":
        return None
    path = Path(configured) if configured else Path(__file__).parent / "kernels/pd_kv.json"
    return read_kernel(path) if configured or path.exists() else None


def has_package(name: str) -> bool:
    """Installed, without importing it or, for `a.b`, its parents."""
    first, *rest = name.split(".")
    spec = importlib.util.find_spec(first)
    if spec is None or not rest:
        return spec is not None
    return any(Path(place, *rest).is_dir() for place in spec.submodule_search_locations or ())


@functools.cache
def probe() -> Found:
    """What moves KV of NPU tensors; the environment is read once.

    Raises:
        PDConfigError: a variable forces what is not there.
    """
    found = _find_best()
    forced = os.environ.get(BACKEND_VARIABLE)
    if not forced:
        return found
    try:
        backend = Backend(forced)
    except ValueError:
        names = ", ".join(backend.value for backend in Backend)
        raise PDConfigError(f"{BACKEND_VARIABLE}={forced}: want one of {names}") from None
    return _force(found, backend)


def _force(found: Found, backend: Backend) -> Found:
    order = list(Backend)
    needs_extension = backend in (Backend.EXTENSION_KERNEL, Backend.EXTENSION_MEMCPY)
    if order.index(backend) < order.index(found.backend) or (needs_extension and found.extension is None):
        raise PDConfigError(f"{BACKEND_VARIABLE}={backend.value} is not there: {'; '.join(found.reasons)}")
    kernel = found.kernel if backend is Backend.EXTENSION_KERNEL else None
    return Found(backend, (f"{BACKEND_VARIABLE} forces it",), found.extension if needs_extension else None, kernel)


def _find_best() -> Found:
    if not has_package("torch_npu"):
        return Found(Backend.TORCH, ("torch_npu is not installed",))
    reasons: list[str] = []
    extension, kernel = find_extension(), find_kernel()
    if extension is None:
        reasons.append(f"the extension {MODULE} is neither in {EXTENSION_VARIABLE} nor in {Path(__file__).parent}")
    elif kernel is not None:
        return Found(Backend.EXTENSION_KERNEL, (), extension, kernel)
    else:
        reasons.append(f"no kernel binary ({KERNEL_VARIABLE})")
        return Found(Backend.EXTENSION_MEMCPY, tuple(reasons), extension)
    if has_package("triton") and has_package("triton.backends.ascend"):
        return Found(Backend.TRITON, tuple(reasons))
    return Found(Backend.TORCH, (*reasons, "triton-ascend is not installed"))
