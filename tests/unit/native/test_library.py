# SPDX-License-Identifier: Apache-2.0
"""Loading the host library: what is said when it is not there, too old, or not a library."""

from __future__ import annotations

import ctypes
import errno
import subprocess
import sys

import pytest

from vllm_ascend_pd.native import library
from vllm_ascend_pd.native.library import NativeError, NativeLibraryError


def test_missing_library_says_how_to_build_it(tmp_path):
    with pytest.raises(NativeLibraryError, match=r"libpd_host.so has not been built.*python -m tools.native build"):
        library._open(tmp_path / "libpd_host.so")


def test_file_that_is_no_library_says_how_to_build_it(tmp_path):
    path = tmp_path / "libpd_host.so"
    path.write_bytes(b"not a library")
    with pytest.raises(NativeLibraryError, match=r"cannot be loaded.*make build"):
        library._open(path)


def test_another_abi_version_names_both(monkeypatch):
    monkeypatch.setattr(library, "ABI_VERSION", 999)
    with pytest.raises(NativeLibraryError, match=r"ABI version 1, this code needs 999"):
        library._open(library.LIBRARY_PATH)


def test_missing_function_says_how_to_build_it():
    with pytest.raises(NativeLibraryError, match="has no pd_no_such_function: build it"):
        library.declare("pd_no_such_function", ctypes.c_int, [])


def test_unknown_kernel_names_those_of_this_machine():
    code = "from vllm_ascend_pd.native.copying import kernel_name\nkernel_name()\n"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PD_COPY_KERNEL": "sse9"}, capture_output=True, text=True, check=False
    )
    assert 'ValueError: PD_COPY_KERNEL: "sse9", but this machine has ' in done.stderr
    assert "portable" in done.stderr


def test_codes_become_exceptions(monkeypatch):
    monkeypatch.setattr(library, "last_error", lambda: "why")
    assert library.check(3) == 3
    for code, kind in ((-1, ValueError), (-2, MemoryError), (-3, OSError), (-4, NativeError)):
        with pytest.raises(kind, match="why"):
            library.check(code)


def test_system_errors_keep_their_number():
    create = library.declare("pd_mapping_create", ctypes.c_void_p, [ctypes.c_int, ctypes.c_uint64, ctypes.c_int])
    with pytest.raises(OSError, match="Bad file descriptor") as failure:
        library.check_handle(create(10_000, 4096, 0))
    assert failure.value.errno == errno.EBADF
