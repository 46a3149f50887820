# SPDX-License-Identifier: Apache-2.0
"""Rewrites bishengir's final HIVM module into upstream MLIR that calls a runtime of ours for all that is hardware.

Pure: text in, text out. Buffers become memrefs from the runtime; flags, barriers and the program's number become
calls; the transfers are calls already. An operation that is not known stops it, so nothing is lost silently.
"""

from __future__ import annotations

import re
from typing import Final

from tools.npu_triton.env import TritonToolError

PIPES: Final = {"PIPE_S": 0, "PIPE_V": 1, "PIPE_M": 2, "PIPE_MTE1": 3, "PIPE_MTE2": 4, "PIPE_MTE3": 5, "PIPE_ALL": 6}
SUFFIX: Final = "_hivm"  # of the kernel's function; the entry has the plain name
_C: Final = "attributes {llvm.emit_c_interface}"
_DECLARATIONS: Final = (
    f"func.func private @pd_sim_program() -> i64 {_C}",
    f"func.func private @pd_sim_barrier(i64) {_C}",
    f"func.func private @pd_sim_set_flag(i64, i64, i64) {_C}",
    f"func.func private @pd_sim_wait_flag(i64, i64, i64) {_C}",
    f"func.func private @pd_sim_buffer_i32(i64) -> memref<?xi32> {_C}",
    f"func.func private @pd_sim_global_i32(i64) -> memref<?xi32> {_C}",
)
_CAST: Final = re.compile(
    r"(%\w+) = hivm\.hir\.pointer_cast\((%\w+)\)\s*(?:\[[^\]]*\])?\s*: memref<((?:\d+x|\?x)+)i32>"
)
_FLAG: Final = re.compile(r"hivm\.hir\.(set|wait)_flag\[<(\w+)>, <(\w+)>, (?:<EVENT_ID(\d+)>|(%\w+))\]")
_BARRIER: Final = re.compile(r"hivm\.hir\.pipe_barrier\[<(\w+)>\]")
_PROGRAM: Final = re.compile(r"(%\w+) = hivm\.hir\.get_block_idx -> i64")
_NOTE: Final = re.compile(r" \{(?:hivm\.unlikely_condition|pipeline\.\w+|markDCacheInvalidatePatternVisited[^}]*)\}")


def count_waits(text: str) -> int:
    """How many wait_flag operations a module has."""
    return text.count("hivm.hir.wait_flag")


def drop_wait(text: str, number: int) -> str:
    """The module without its wait_flag of this number (from 0): a synchronisation bug on purpose."""
    kept, seen = [], 0
    for line in text.splitlines():
        if "hivm.hir.wait_flag" in line:
            seen += 1
            if seen - 1 == number:
                continue
        kept.append(line)
    return "\n".join(kept)


class _Rewriter:
    """One pass over the lines of a module; counts the names that it invents."""

    def __init__(self, kernel: str, on_chip: set[str]) -> None:
        self._kernel = kernel
        self._on_chip = on_chip
        self._names = 0

    def _constant(self, value: int) -> tuple[str, str]:
        self._names += 1
        return f"%pdc{self._names}", f"%pdc{self._names} = arith.constant {value} : i64"

    def _pipe(self, name: str) -> tuple[str, str]:
        if name not in PIPES:
            raise TritonToolError(f"HIVM: pipe {name} is not known, only {', '.join(PIPES)}")
        return self._constant(PIPES[name])

    def rewrite(self, line: str) -> list[str]:
        """The lines that stand for one line."""
        if match := _CAST.fullmatch(line):
            return self._cast(*match.groups())
        if match := _FLAG.fullmatch(line):
            return self._flag(*match.groups())
        if match := _BARRIER.fullmatch(line):
            pipe, made = self._pipe(match[1])
            return [made, f"func.call @pd_sim_barrier({pipe}) : (i64) -> ()"]
        if match := _PROGRAM.fullmatch(line):
            return [f"{match[1]} = func.call @pd_sim_program() : () -> i64"]
        if line == "hivm.hir.set_mask_norm":  # vector masks: no vector instruction is left in these kernels
            return []
        if "hivm.hir." in line:
            raise TritonToolError(f"HIVM: no meaning is known for `{line}`")
        if line.startswith("module attributes"):
            return ["module {", *_DECLARATIONS]
        if line.startswith("func.func"):
            return [self._function(line)]
        return [_NOTE.sub("", line)]

    def _cast(self, name: str, address: str, shape: str) -> list[str]:
        self._names += 1
        raw = f"%pdm{self._names}"
        place = "buffer" if name in self._on_chip else "global"
        got = f"{raw} = func.call @pd_sim_{place}_i32({address}) : (i64) -> memref<?xi32>"
        sides = shape.rstrip("x").split("x")
        if sides == ["?"]:
            return [got, f"{name} = memref.cast {raw} : memref<?xi32> to memref<?xi32>"]
        sizes = [int(side) for side in sides]
        strides = [1]
        for size in reversed(sizes[1:]):
            strides.insert(0, strides[0] * size)
        strided = f"memref<{shape}i32, strided<{strides}>>"
        return [
            got,
            f"%pdr{self._names} = memref.reinterpret_cast {raw} to offset: [0], sizes: {sizes}, strides: {strides}"
            f" : memref<?xi32> to {strided}",
            f"{name} = memref.cast %pdr{self._names} : {strided} to memref<{shape}i32>",
        ]

    def _flag(self, verb: str, source: str, target: str, number: str | None, value: str | None) -> list[str]:
        (first, made_first), (second, made_second) = self._pipe(source), self._pipe(target)
        made = [made_first, made_second]
        if number is not None:
            value, made_value = self._constant(int(number))
            made.append(made_value)
        return [*made, f"func.call @pd_sim_{verb}_flag({first}, {second}, {value}) : (i64, i64, i64) -> ()"]

    def _function(self, line: str) -> str:
        head, _, rest = line.partition(" attributes {")
        head = re.sub(r" \{(?:hacc|tt)\.[^}]*\}", "", head)
        head = head.replace(f"@{self._kernel}(", f"@{self._kernel}{SUFFIX}(")
        return f"{head} {_C}" + (" {" if rest.endswith("} {") else "")


def rewrite(text: str, kernel: str) -> str:
    """Upstream MLIR for a module; its kernel is called `<kernel>_hivm`.

    Raises:
        TritonToolError: an operation of the module is not known here.
    """
    on_chip = set(re.findall(r"(%\w+) = hivm\.hir\.pointer_cast\([^)]*\)[^:]*: memref<[^>]*address_space<ub>>", text))
    text = re.sub(r", #hivm\.address_space<\w+>", "", text)
    rewriter = _Rewriter(kernel, on_chip)
    return "\n".join(made for line in text.splitlines() for made in rewriter.rewrite(line.strip())) + "\n"
