# SPDX-License-Identifier: Apache-2.0
"""Mappings of shared files at 2 MiB-aligned addresses.

Usable from any thread; a mapping ends when its object is closed or collected, whichever comes first.
"""

from __future__ import annotations

import errno
from typing import Final

from vllm_ascend_pd.native.shared_memory import FileMapping

ALIGNMENT: Final = 2 << 20  # the alignment of registered bases, and the size of a huge page


def round_up(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """The smallest multiple of `alignment` that holds `num_bytes`."""
    return -(-num_bytes // alignment) * alignment


class SharedMapping(FileMapping):
    """One file mapped at an aligned address. The descriptor is not kept.

    Raises OSError (ENOMEM: no address space) from the constructor.
    """

    def __init__(self, fd: int, num_bytes: int, *, writable: bool) -> None:
        if num_bytes <= 0:
            raise OSError(errno.EINVAL, f"cannot map {num_bytes} bytes")
        super().__init__(fd, num_bytes, writable=writable)
        self.num_bytes = round_up(num_bytes)
