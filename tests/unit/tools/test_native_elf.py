# SPDX-License-Identifier: Apache-2.0
import re
import sys

import pytest

from tests.fork.elf_files import make_library
from tools.cache import CacheError
from tools.native.elf import check_library, read_library

GLIBC = (2, 28)


def test_machine_libraries_and_versions_are_read():
    library = read_library("x.so", make_library("aarch64", ["libc.so.6", "libm.so.6"], ["GLIBC_2.4", "GLIBC_2.17"]))
    assert (library.machine, library.needed) == ("aarch64", ("libc.so.6", "libm.so.6"))
    assert (library.versions, library.glibc) == (("GLIBC_2.17", "GLIBC_2.4"), (2, 17))


def test_a_real_library_is_read_as_well():
    """Not only what our own builder writes: this process's C library."""
    with open("/proc/self/maps") as maps:
        path = next(
            words[-1] for line in maps if re.search(r"/libc(\.so\.6|-[\d.]+\.so)$", (words := line.split())[-1])
        )
    with open(path, "rb") as file:
        library = read_library(path, file.read())
    assert library.needed[0].startswith("ld-linux")
    assert sys.maxsize > 2**32
    assert "GLIBC_PRIVATE" in library.versions


def test_a_library_within_the_limits_is_accepted():
    check_library("x.so", make_library(versions=["GLIBC_2.28"]), "x86_64", GLIBC)
    check_library("x.so", make_library(needed=[], versions=[]), "x86_64", GLIBC)


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (make_library("aarch64"), "is built for aarch64, want x86_64"),
        (make_library(versions=["GLIBC_2.29"]), "needs glibc 2.29, want at most glibc 2.28"),
        (make_library(versions=["GLIBC_2.4", "GLIBC_3.0"]), "needs glibc 3.0, want at most glibc 2.28"),
        (make_library(versions=["GLIBCXX_3.4.30"]), "needs GLIBCXX_3.4.30"),
        (make_library(versions=["GLIBC_PRIVATE"], needed=["libstdc++.so.6"]), r"needs libstdc\+\+.so.6"),
        (make_library(40), "is for ELF machine 40, want one of x86_64, aarch64"),
        (b"MZ" + make_library()[2:], "is not a 64-bit little-endian ELF file"),
        (make_library()[:-1], "is damaged"),
        (make_library()[:70], "is damaged"),
        (b"", "is not a 64-bit"),
    ],
)
def test_a_library_that_would_not_load_everywhere_is_refused(library, said):
    with pytest.raises(CacheError, match=rf"x\.so: .*{said}"):
        check_library("x.so", library, "x86_64", GLIBC)
