# SPDX-License-Identifier: Apache-2.0
"""Calls kernels that were made for this machine, with the arguments packed as a launcher of the NPU packs them."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from pathlib import Path

LOAD_PIPE, STORE_PIPE = 4, 5
FAULTS = ("flags_left", "deadlocks", "overruns", "misaligned")


class Options(ctypes.Structure):
    _fields_ = [
        ("cores", ctypes.c_uint32),
        ("delay_us", ctypes.c_uint32),
        ("slow_pipe", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("flag_timeout_ms", ctypes.c_uint32),
    ]


class Stats(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("loads", "stores", "bytes_loaded", "bytes_stored", *FAULTS)]


def pack(addresses: list[int], num_rows: int, num_blocks: int, grid: int) -> bytes:
    """`addresses`: rows, block ids, staging."""
    return struct.pack("<6Q5i", 0, 0, 0, *addresses, num_rows, num_blocks, grid, 1, 1)


@dataclass
class Simulator:
    """Launches for `find_differences`; gathers the statistics of each."""

    library: Path
    grid: int
    suffix: str = ""
    slow_pipe: int = -1
    delay_us: int = 20
    seed: int = 0
    stats: dict[str, Stats] = field(default_factory=dict)

    def launch(self, verb: str, rows, ids, staging, num_rows: int, num_blocks: int) -> None:
        function = getattr(ctypes.CDLL(str(self.library)), f"pd_kv_{verb}{self.suffix}_sim")
        function.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p]
        addresses = [tensor.data_ptr() for tensor in (rows, ids, staging)]
        packed, stats = pack(addresses, num_rows, num_blocks, self.grid), Stats()
        options = Options(2, self.delay_us, self.slow_pipe, self.seed, 2000)
        done = function(packed, len(packed), self.grid, ctypes.byref(options), ctypes.byref(stats))
        assert done == 0
        self.stats[verb] = stats

    def find_faults(self) -> list[str]:
        return [
            f"{verb}: {getattr(stats, name)} {name}"
            for verb, stats in self.stats.items()
            for name in FAULTS
            if getattr(stats, name)
        ]
