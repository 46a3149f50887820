# SPDX-License-Identifier: Apache-2.0
"""Handoffs: the digest that binds one to its prompt, the signature, and the `kv_transfer_params` that carry it.

Pure; any thread. A prefill engine signs, a decode instance converts, verifies, and only then dials what the handoff
names. The keys beside `pd_handoff` have NixlConnector's shape for routers that look at them; nothing here reads them.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from vllm_ascend_pd.errors import PDHandoffError
from vllm_ascend_pd.secret import SECRET_FLAG, Secret
from vllm_ascend_pd.wire import Handoff

HANDOFF_KEY: Final = "pd_handoff"
MAX_GROUPS: Final = 64
# Fits a control frame (`wire.MAX_FRAME_BYTES`) at five bytes an id.
MAX_BLOCK_IDS: Final = 1 << 19
MAX_INT: Final = (1 << 31) - 1
MAX_NAME_CHARS: Final = 512
DIGEST_CHARS: Final = 64

_PURPOSE: Final = "handoff"


def prompt_digest(token_ids: Sequence[int], salt: str = "") -> str:
    """Hex SHA-256 of the tokens (and the cache salt) that a handoff's KV was computed from."""
    tokens = array("q", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    salt_bytes = salt.encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(struct.pack("<Q", len(salt_bytes)))
    digest.update(salt_bytes)
    digest.update(tokens)
    return digest.hexdigest()


def ask_bytes(transfer_id: str, digest: str) -> bytes:
    """What an API server signs when it asks its own engine core for a lease: the transfer, and its prompt's digest.

    The engine core takes the digest over, as hashing a long prompt would take a step too long.
    """
    return msgspec.msgpack.encode([transfer_id.encode("utf-8", "surrogatepass"), digest.encode("utf-8", "replace")])


def sign_handoff(handoff: Handoff, secret: Secret) -> Handoff:
    """The same handoff with a signature over all of its fields."""
    return msgspec.structs.replace(handoff, signature=secret.sign(_PURPOSE, _signed_bytes(handoff)))


def verify_handoff(handoff: Handoff, secret: Secret) -> None:
    """Return when a holder of the secret made this handoff.

    Raises:
        PDHandoffError: it is unsigned, or a field has been changed, or the other side has another secret.
    """
    if not handoff.signature:
        raise PDHandoffError(f"handoff {_short(handoff.transfer_id)}: is not signed")
    if not secret.verify(handoff.signature, _PURPOSE, _signed_bytes(handoff)):
        raise PDHandoffError(
            f"handoff {_short(handoff.transfer_id)}: wrong signature; it was changed on the way, or the prefill side "
            f"has another {SECRET_FLAG}"
        )


def _signed_bytes(handoff: Handoff) -> bytes:
    # By name and in the order of the definition, so that a field added later is covered without a change here.
    return msgspec.msgpack.encode(msgspec.structs.replace(handoff, signature=""))


def to_kv_transfer_params(handoff: Handoff, request_id: str, tp_size: int) -> dict[str, Any]:
    """What a prefill answer carries: NixlConnector's keys, and the signed handoff. JSON-able."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(group) for group in handoff.block_ids],
        "remote_engine_id": handoff.engine_id,
        "remote_request_id": request_id,
        "remote_host": handoff.host,
        "remote_port": handoff.port,
        "tp_size": tp_size,
        "remote_num_tokens": handoff.num_tokens,
        "remote_blocks_expiry_time": time.time() + handoff.lease_ms / 1000,
        HANDOFF_KEY: msgspec.to_builtins(handoff),
    }


def from_kv_transfer_params(params: Mapping[str, Any]) -> Handoff | None:
    """The handoff in a request's `kv_transfer_params`, well-formed but not verified; None when there is none.

    Raises:
        PDHandoffError: it is not of the right form; names the field.
    """
    value = params.get(HANDOFF_KEY)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise PDHandoffError(f"{HANDOFF_KEY}: has to be an object, not {type(value).__name__}")
    _check_size(value.get("block_ids"))
    try:
        handoff = msgspec.convert(value, Handoff, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise PDHandoffError(f"{HANDOFF_KEY}: {_short(str(error))}") from error
    _check_values(handoff)
    return handoff


def _check_size(block_ids: object) -> None:
    """Before conversion, so that an absurd list costs nothing. Types are left to the conversion."""
    if not isinstance(block_ids, (list, tuple)):
        return
    num_ids = sum(len(group) for group in block_ids if isinstance(group, (list, tuple)))
    if len(block_ids) > MAX_GROUPS or num_ids > MAX_BLOCK_IDS:
        raise PDHandoffError(
            f"{HANDOFF_KEY}: block_ids has {len(block_ids)} groups and {num_ids} ids, at most {MAX_GROUPS} and "
            f"{MAX_BLOCK_IDS} are accepted"
        )


def _check_values(handoff: Handoff) -> None:
    for name in ("transfer_id", "lease_id", "engine_id", "epoch", "host", "layout"):
        text = getattr(handoff, name)
        if not text or len(text) > MAX_NAME_CHARS:
            raise PDHandoffError(
                f"{HANDOFF_KEY}: {name} has to have 1 to {MAX_NAME_CHARS} characters, it has {len(text)}"
            )
    for name, lengths in (("prompt_digest", (DIGEST_CHARS,)), ("signature", (DIGEST_CHARS, 0))):
        if len(getattr(handoff, name)) not in lengths:
            raise PDHandoffError(f"{HANDOFF_KEY}: {name} has to have {DIGEST_CHARS} hex digits")
    for name, low, high in (("port", 1, 65535), ("num_tokens", 1, MAX_INT), ("lease_ms", 1, MAX_INT)):
        number = getattr(handoff, name)
        if not low <= number <= high:
            raise PDHandoffError(f"{HANDOFF_KEY}: {name} has to be in {low}..{high}, it is {_short(str(number))}")
    if not handoff.block_ids:
        raise PDHandoffError(f"{HANDOFF_KEY}: block_ids has no group")
    for index, group in enumerate(handoff.block_ids):
        if group and not (min(group) >= 0 and max(group) <= MAX_INT):
            raise PDHandoffError(f"{HANDOFF_KEY}: block_ids[{index}] has an id outside 0..{MAX_INT}")


def _short(text: str) -> str:
    """Values come from clients: bounded, and without line breaks for the log."""
    return repr(text[:120])
