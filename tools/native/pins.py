# SPDX-License-Identifier: Apache-2.0
"""The tools that build and examine the C++, as wheels of the package index with their hashes.

Raising a version means the hashes of both machines' wheels: `pip download --platform manylinux2014_aarch64 ...`.
"""

from __future__ import annotations

from typing import Final

from tools.cache import PinnedWheel

# The product's compiler: clang, lld, libc++ and the stubs of every glibc, in one wheel. 0.16 and 0.17 build their
# libc++ on one core, which doubles the first build; clang-tidy and clang-format are of the same LLVM.
ZIG: Final = PinnedWheel(
    "ziglang",
    "0.15.2",
    (
        "806316453d1ede7174ed3fefb8e5348154629089c3bb5fe812dfd0e172fac130",  # x86-64
        "edc0aa60ec964a4cf462d40f68d7de242ddf37fd9a80f2afaee6397059463230",  # aarch64
    ),
)
CLANG_VERSION: Final = "20.1.2"  # of that zig
CMAKE: Final = PinnedWheel(
    "cmake",
    "4.4.5",
    (
        "85625a9b6d5e88ff99c7eb79123d85570844e77ac076366cf75c609cc0b1b579",
        "25fc8469e67857124ef10c002331c0ab416eb7b8d9e1d6e4c58e84e730013ece",
    ),
)
NINJA: Final = PinnedWheel(
    "ninja",
    "1.13.2",
    (
        "65a24341b5ac09fcadcc37082660be40a94174e51a937fabf6e2cae26225fa2c",
        "d775a5e43e9088f507a6250d57fcf5678eb31268c545feb5064ffeee33735622",
    ),
)
CLANG_TIDY: Final = PinnedWheel(
    "clang-tidy",
    "20.1.0",
    (
        "e205541e350044ffe0b0d1fcaf62b9953890f8ecba31458bbcdcfe73040e58b6",
        "14125fd35b2d324da33c884ab8b5a1d9d70a5a2e76f071ca14783d325a992917",
    ),
)
AUDITWHEEL: Final = (
    PinnedWheel("auditwheel", "6.8.2", ("05fd2dd4b743217cd5f66066adc95b03a079424b1f0a878ad1e40fe2cdea4704",)),
    PinnedWheel("pyelftools", "0.33", ("f215ad5f47d3f1373a21496a6c9e0707c622840d0622f23ff7ce08678b020036",)),
    PinnedWheel("packaging", "26.4", ("81383611a09c1bc0b08b76e0fd5829d7c6824c65b27a6aee339da133f4233ea2",)),
)
