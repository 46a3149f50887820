# SPDX-License-Identifier: Apache-2.0
"""The bodies of our HTTP endpoints (JSON): decode's API servers send, prefill's answer.

Every POST carries the header of `secret.sign_request`, so that only a holder of the deployment's secret can make
a prefill instance compute or forget something. Owns no thread.
"""

from __future__ import annotations

from typing import Final

import msgspec

from vllm_ascend_pd.wire import Handoff

PREFILL_PATH: Final = "/pd/prefill"
CANCEL_PATH: Final = "/pd/cancel"
PEER_PATH: Final = "/pd/peer"
STATUS_PATH: Final = "/pd/status"
DRAIN_PATH: Final = "/pd/drain"

MAX_BODY_BYTES: Final = 32 << 20  # four million token ids


class PrefillAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Compute the KV of these tokens and lease it to `transfer_id`."""

    transfer_id: str
    token_ids: list[int]
    cache_salt: str | None = None
    priority: int = 0


class PrefillAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The grant, and what the prefill instance knows by having computed it."""

    handoff: Handoff
    first_token_id: int
    cached_tokens: int


class CancelAsk(msgspec.Struct, frozen=True, kw_only=True):
    """The request is gone on the decode side."""

    transfer_id: str


class PeerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Public facts: who a prefill instance is and where its engine core answers the handshake."""

    role: str
    engine_id: str
    epoch: str
    host: str
    port: int
    wire_version: int
    draining: bool = False  # it goes on with what it has; ask another one


class ErrorBody(msgspec.Struct, frozen=True):
    """`{"error": {...}}`, the shape that all endpoints of the server answer errors in."""

    error: dict[str, object]
