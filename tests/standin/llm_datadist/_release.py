# SPDX-License-Identifier: Apache-2.0
"""Which release's surface is shown (`STANDIN_CANN`), and what of it differs (datadist-api.md §0)."""

from __future__ import annotations

import os
from enum import Enum, IntEnum

RELEASE = os.environ.get("STANDIN_CANN", "9.1.0")
_KNOWN = ("8.2.0", "8.5.0", "9.0.0", "9.1.0")
if RELEASE not in _KNOWN:
    raise ImportError(f"STANDIN_CANN is {RELEASE!r}, known are {_KNOWN}")

HAS_COMM_RES = RELEASE != "8.2.0"
HAS_HIXL = RELEASE in ("9.0.0", "9.1.0")
MUTATES_OPTIONS = RELEASE != "9.1.0"  # of `init`


class _NamedInt(IntEnum):
    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


BaseEnum: type = _NamedInt if RELEASE == "9.1.0" else Enum  # of roles, statuses, placements
