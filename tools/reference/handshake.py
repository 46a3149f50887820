# SPDX-License-Identifier: Apache-2.0
"""`handshake.md`: the fields that two instances compare, from `handshake.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tools.reference.markdown import code, codes, page, table
from vllm_ascend_pd import handshake
from vllm_ascend_pd.datadist.api import Way
from vllm_ascend_pd.datadist.environment import TOLD, describe_data_plane
from vllm_ascend_pd.wire import WIRE_VERSION

_FACTS = ("cann", "vllm_ascend", "chip", "driver", "torch_npu")


def data_plane_fields() -> tuple[list[str], list[str]]:
    """Names of what NPU hosts compare, and tell, in `data_plane` and `data_plane_told`."""
    module: Any = SimpleNamespace(name="cann", ways=(Way.HIXL,))
    compared, told = describe_data_plane(
        module, environ=dict.fromkeys(TOLD, "1"), facts=lambda: SimpleNamespace(**dict.fromkeys(_FACTS)), tls=lambda: ""
    )
    return list(compared), list(told)


def render() -> str:
    """The page."""
    compared, told = data_plane_fields()
    rows = [(str(place), code(field)) for place, field in enumerate(handshake.MUST_BE_EQUAL, 1)]
    return page(
        "Handshake",
        "Before anything moves, a decode instance's engine core sends one record to the prefill instance's; both "
        "compare. "
        "The first difference, in this order, refuses the pair and is printed on both sides with both values. Nested "
        "fields are named to the leaf, as `model_config.hidden_size` or `layout.groups[0].block_size`. Long values are "
        "shortened and end in a hash.",
        f"This release speaks wire version {WIRE_VERSION}.",
        "## Must be equal",
        table(("", "field"), rows),
        "`data_plane` on a CPU is the implementation's name. On NPU hosts it has these fields: "
        f"{codes(compared)}. What could not be read on one side is equal to anything.",
        "## One common value is enough",
        codes(handshake.MUST_OVERLAP),
        "## Told, not compared",
        codes(handshake.INFORMATION),
        f"`data_plane_told` on NPU hosts: {codes(told)} (variables only where they are set).",
    )
