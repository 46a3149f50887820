# SPDX-License-Identifier: Apache-2.0
"""`handshake.md`: the fields that two instances compare, from `handshake.py`."""

from __future__ import annotations

from tools.reference.markdown import code, codes, page, table
from vllm_ascend_pd import handshake
from vllm_ascend_pd.wire import WIRE_VERSION


def render() -> str:
    """The page."""
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
        "## One common value is enough",
        codes(handshake.MUST_OVERLAP),
        "## Told, not compared",
        codes(handshake.INFORMATION),
    )
