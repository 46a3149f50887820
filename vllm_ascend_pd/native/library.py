# SPDX-License-Identifier: Apache-2.0
"""Loads `libpd_host.so` by ctypes, which releases the interpreter's lock during every call. Any thread.

There is no fallback in Python: without the library nothing can be copied. Each wrapper declares the functions that it
uses through `declare`; errors of the C ABI become Python exceptions in `check`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ABI_VERSION: Final = 1  # PD_ABI_VERSION of csrc_npu/include/pd/c_api.h
LIBRARY_PATH: Final = Path(__file__).resolve().parent / "libpd_host.so"
_PATH_VARIABLE: Final = "VLLM_PD_HOST_LIBRARY"  # another build: sanitizers, a debugger

_HOW_TO_BUILD: Final = "build it with `python -m tools.native build` (`make build` does that, too)"
_ERROR_INVALID, _ERROR_MEMORY, _ERROR_SYSTEM = -1, -2, -3

_lock = threading.Lock()  # guards _library
_library: ctypes.CDLL | None = None


class NativeLibraryError(ImportError):
    """The host library is not there, or is not the one that this code was written for: build it again."""


class NativeError(RuntimeError):
    """The library failed in a way that is nobody's argument."""


def load() -> ctypes.CDLL:
    """The library, loaded at the first call. Raises NativeLibraryError."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = _open(Path(os.environ.get(_PATH_VARIABLE) or LIBRARY_PATH))
    return _library


def _open(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise NativeLibraryError(f"the host library {path} has not been built: {_HOW_TO_BUILD}")
    try:
        library = ctypes.CDLL(str(path))
        version = int(library.pd_abi_version())
    except (OSError, AttributeError) as error:
        raise NativeLibraryError(f"the host library {path} cannot be loaded ({error}): {_HOW_TO_BUILD}") from error
    if version != ABI_VERSION:
        raise NativeLibraryError(
            f"the host library {path} has ABI version {version}, this code needs {ABI_VERSION}: {_HOW_TO_BUILD}"
        )
    library.pd_last_error.restype = ctypes.c_char_p
    library.pd_last_errno.restype = ctypes.c_int
    return library


def declare(name: str, result: Any, arguments: Sequence[Any]) -> Any:
    """The function `name` with its types, of the type `ctypes._FuncPtr`. Raises NativeLibraryError."""
    try:
        function = getattr(load(), name)
    except AttributeError as error:
        raise NativeLibraryError(f"the host library has no {name}: {_HOW_TO_BUILD}") from error
    function.restype, function.argtypes = result, list(arguments)
    return function


def last_error() -> str:
    """Why this thread's last call failed."""
    text: bytes | None = load().pd_last_error()
    return (text or b"").decode(errors="replace")


def check(code: int) -> int:
    """Return `code` unless it says that a call of this thread failed.

    Raises:
        ValueError: an argument.
        MemoryError, OSError: no memory, refused by the operating system.
        NativeError: anything else.
    """
    if code >= 0:
        return code
    text = last_error()
    if code == _ERROR_INVALID:
        raise ValueError(text)
    if code == _ERROR_MEMORY:
        raise MemoryError(text)
    if code == _ERROR_SYSTEM:
        raise OSError(int(load().pd_last_errno()), text)
    raise NativeError(text)


def check_handle(handle: int | None) -> int:
    """Return a handle; where a call of this thread returned none, raise OSError or ValueError with its text."""
    if not handle:
        number = int(load().pd_last_errno())
        raise OSError(number, last_error()) if number else ValueError(last_error())
    return handle
