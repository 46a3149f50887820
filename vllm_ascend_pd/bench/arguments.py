# SPDX-License-Identifier: Apache-2.0
"""Arguments that both benches share, and sizes like 4K or 2M."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from vllm_ascend_pd.errors import PDConfigError

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """`--json`, `--plot`."""
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every sample here (default: not written)")
    parser.add_argument(
        "--plot", type=Path, metavar="PATH", help="write the chart here, .png, .svg or .pdf (default: not drawn)"
    )


def parse_size(flag: str, text: str) -> int:
    """`4K`, `4KiB`, `4096`; powers of two. Raises PDConfigError."""
    bare = text.strip().upper().removesuffix("IB")
    unit = bare[-1:] if bare[-1:] in ("K", "M", "G") else ""
    number = bare.removesuffix(unit)
    if not number.isdigit() or int(number) == 0:
        raise PDConfigError(f"{flag}: {text!r} is not a size like 4K, 2M or 4096")
    return int(number) * _UNITS[unit]


def parse_sizes(flag: str, text: str) -> list[int]:
    """Several, separated by commas; in ascending order, each once. Raises PDConfigError."""
    return sorted({parse_size(flag, part) for part in text.split(",")})
