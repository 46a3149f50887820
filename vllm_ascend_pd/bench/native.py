# SPDX-License-Identifier: Apache-2.0
"""Typed calls into `libpd_bench.so` (csrc_npu/bench): the copy limit, the pattern, a plain TCP stream.

Standard library only. ctypes releases the GIL during the calls, which may come from any thread; one team copies for
one caller at a time.
"""

from __future__ import annotations

import array
import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any, Final

from vllm_ascend_pd.errors import PDConfigError

LIBRARY: Final = Path(__file__).resolve().parent.parent / "native" / "libpd_bench.so"
_U64 = ctypes.c_uint64
_POINTER = ctypes.c_void_p


@cache
def load_library() -> Any:
    """The loaded library. Raises PDConfigError when it was not built."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise PDConfigError(f"{LIBRARY} cannot be loaded ({error}); build it: python -m tools.native build") from None
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "pd_bench_kernels": (ctypes.c_char_p, []),
        "pd_bench_team_create": (_POINTER, [ctypes.c_uint]),
        "pd_bench_team_destroy": (None, [_POINTER]),
        "pd_bench_copy": (ctypes.c_double, [_POINTER, ctypes.c_int, _U64, _U64, _POINTER, _POINTER]),
        "pd_bench_fill": (None, [_U64, _U64, _U64]),
        "pd_bench_check": (ctypes.c_int64, [_U64, _U64, _POINTER, _POINTER, _U64]),
        "pd_bench_poison": (None, [_U64, _U64, _POINTER]),
        "pd_bench_check_poison": (ctypes.c_int64, [_U64, _U64]),
        "pd_bench_send": (ctypes.c_int, [ctypes.c_int, _U64, _U64, _U64]),
        "pd_bench_receive": (ctypes.c_int, [ctypes.c_int, _U64, _U64, _U64]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def kernel_names() -> list[str]:
    """The copy kernels that this CPU runs."""
    return str(load_library().pd_bench_kernels().decode()).split(",")


class Team:
    """Threads that copy pieces; the caller is one of them."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._team: int | None = load_library().pd_bench_team_create(num_threads)
        if not self._team:
            raise RuntimeError(f"cannot start {num_threads} threads")

    def copy(self, kernel: int, piece_bytes: int, destinations: array.array[int], sources: array.array[int]) -> float:
        """Copy all pieces; seconds."""
        seconds: float = load_library().pd_bench_copy(
            self._team, kernel, len(sources), piece_bytes, destinations.buffer_info()[0], sources.buffer_info()[0]
        )
        if seconds < 0:
            raise ValueError(f"no copy kernel {kernel}, or pieces of {piece_bytes} bytes")
        return seconds

    def close(self) -> None:
        """End the threads."""
        team, self._team = self._team, None
        if team:
            load_library().pd_bench_team_destroy(team)


def fill(address: int, num_bytes: int, seed: int) -> None:
    """Write the pattern."""
    load_library().pd_bench_fill(address, num_bytes, seed)


def find_wrong_byte(addresses: array.array[int], offsets: array.array[int], piece_bytes: int, seed: int) -> int | None:
    """Compare piece i with the pattern from offsets[i] on; index over all pieces of the first wrong byte."""
    found: int = load_library().pd_bench_check(
        len(addresses), piece_bytes, addresses.buffer_info()[0], offsets.buffer_info()[0], seed
    )
    return None if found < 0 else found


def poison(addresses: array.array[int], piece_bytes: int) -> None:
    """Overwrite pieces so that what was there cannot be taken for what should arrive."""
    load_library().pd_bench_poison(len(addresses), piece_bytes, addresses.buffer_info()[0])


def find_unpoisoned_byte(address: int, num_bytes: int) -> int | None:
    """Offset of the first byte that is not poison."""
    found: int = load_library().pd_bench_check_poison(address, num_bytes)
    return None if found < 0 else found


def send(fd: int, address: int, num_bytes: int, chunk_bytes: int) -> None:
    """Send memory over a blocking socket. Raises OSError."""
    _check_stream(load_library().pd_bench_send(fd, address, num_bytes, chunk_bytes))


def receive(fd: int, address: int, num_bytes: int, chunk_bytes: int) -> None:
    """Receive into memory from a blocking socket. Raises OSError, EOFError."""
    _check_stream(load_library().pd_bench_receive(fd, address, num_bytes, chunk_bytes))


def _check_stream(code: int) -> None:
    if code < 0:
        raise EOFError("the other side closed the stream")
    if code > 0:
        raise OSError(code, os.strerror(code))
