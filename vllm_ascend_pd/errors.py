# SPDX-License-Identifier: Apache-2.0
"""The PDError tree. Each class says what the operator does about it.

Owns no thread, imports nothing of ours. Errors that reach an HTTP client carry a status and a code
(`PDRequestError`); all others stop a start, or one request, with a sentence that names the flag or field.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PDError(Exception):
    """Root of all errors of prefill/decode disaggregation."""


class PDConfigError(PDError, ValueError):
    """A flag, variable or combination is wrong. Action: change what the message names and start again."""


class PDPortTakenError(PDConfigError):
    """Another process listens on the port. Action: as its base's; where we may choose, the next port is tried."""


class PDUnreachableError(PDError):
    """A peer or the engine core does not answer. Action: check that it runs and that the address is right."""


class PDRefusedError(PDError):
    """Both sides answer but do not match. Action: make `field` equal on both and restart the named side."""

    def __init__(self, message: str, field: str = "", ours: str = "", theirs: str = "") -> None:
        detail = f" ({field}: ours {ours}, theirs {theirs})" if field else ""
        super().__init__(message + detail)
        self.field = field
        self.ours = ours
        self.theirs = theirs


class PDAuthError(PDError):
    """A secret is missing or a signature is wrong. Action: give both sides the same `--pd-secret-file`."""


class PDHandoffError(PDError):
    """A handoff is forged, expired, or belongs to other tokens. Action: look at who sends such requests."""


class PDRequestError(PDError):
    """One request ends with a typed HTTP error. Action: the client may send it again."""

    http_status = 500
    code = "pd_error"


class PDKVUnavailable(PDRequestError):
    """Remote KV could not be had and policy forbids computing here. Action: look at the prefill instances."""

    http_status = 503
    code = "pd_kv_unavailable"


class PDDraining(PDRequestError):
    """The instance takes no new requests. Action: none; a load balancer or a decode instance asks another one."""

    http_status = 503
    code = "pd_draining"


class PDDeadline(PDRequestError):
    """Remote KV did not come within `--pd-deadline`. Action: add prefill capacity, or raise the deadline."""

    http_status = 504
    code = "pd_deadline"


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` when one of `known` is close to `name`, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
