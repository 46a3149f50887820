# SPDX-License-Identifier: Apache-2.0
"""Bodies of `wire.DoctorAsk` and `wire.DoctorReply`, one pair for each verb. Plain data.

verb    asked      answered    what
open    Open       Opened      who are you; make test memory and listen with the data plane
dial    DialBack   DialedBack  connect to my control plane
pull    PullBack   Pulled      pull my test memory and verify it
close   Close      Closed      forget the session
ping    Ping       Pong        how long is the way
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from vllm_ascend_pd.errors import PDUnreachableError

PROTOCOL: Final = 1  # of these bodies; both doctors must have the same

Body = TypeVar("Body", bound=msgspec.Struct)


class PlaneAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a doctor's test memory is served, and how it lies: `pattern.py` says what every byte must be."""

    cluster_id: int
    host: str
    port: int
    num_blocks: int
    block_bytes: int
    num_tensors: int
    seed: int


class Open(msgspec.Struct, frozen=True, kw_only=True):
    """Begin. `session` is random; the listening doctor serves one at a time."""

    protocol: int
    session: str
    num_bytes: int
    timeout_ms: int
    facts: dict[str, Any]


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """The other side's facts; `plane` is None, with the reason, where it has no data plane to test."""

    facts: dict[str, Any]
    plane: PlaneAddress | None
    reason: str = ""


class DialBack(msgspec.Struct, frozen=True, kw_only=True):
    """Connect to this doctor and ping it."""

    session: str
    host: str
    port: int


class DialedBack(msgspec.Struct, frozen=True, kw_only=True):
    """`problem` is empty when the answer came."""

    problem: str = ""
    rtt_ms: float = 0.0
    mtu: int = 0


class PullBack(msgspec.Struct, frozen=True, kw_only=True):
    """Link to this doctor's data plane, pull everything, verify."""

    session: str
    plane: PlaneAddress


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """`problem` is empty when every byte was right."""

    problem: str = ""
    transport: str = ""
    num_bytes: int = 0
    seconds: float = 0.0  # the best round
    link_seconds: float = 0.0


class Close(msgspec.Struct, frozen=True, kw_only=True):
    """The session is over; how it went, for the people on the other side."""

    session: str
    ok: bool = True
    summary: str = ""


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing of it is left."""


class Ping(msgspec.Struct, frozen=True, kw_only=True):
    """`nonce` comes back."""

    nonce: str


class Pong(msgspec.Struct, frozen=True, kw_only=True):
    """Of a Ping."""

    nonce: str


def read_body(body: dict[str, Any], kind: type[Body]) -> Body:
    """The typed form.

    Raises:
        PDUnreachableError: it has other fields: another release.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise PDUnreachableError(f"the other doctor speaks another protocol ({error}); use one release") from error


def write_body(message: msgspec.Struct) -> dict[str, Any]:
    """The form that travels."""
    body: dict[str, Any] = msgspec.to_builtins(message)
    return body
