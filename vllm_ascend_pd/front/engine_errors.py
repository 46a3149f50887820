# SPDX-License-Identifier: Apache-2.0
"""Typed PD errors on their way through upstream: past `generate`, into an HTTP status or an SSE error event.

`AsyncLLM.generate` passes few exception classes through and hides all others behind a 500: GracefulHTTPError in
0.32.0, ValueError in 0.23.0. So a PDRequestError travels inside one of those, and `create_error_response`, which
every endpoint and every stream uses, is edited to read it. The answer's `type` is our code, its `code` the status.
"""

from __future__ import annotations

import functools
from http import HTTPStatus
from typing import Any

from vllm_ascend_pd.errors import PDRequestError


def as_engine_error(error: PDRequestError) -> Exception:
    """An exception that upstream's `generate` raises unchanged; `pd_error` holds the original."""
    wrapped = _make_wrapper()(error)
    assert isinstance(wrapped, Exception)
    return wrapped


def pd_error_response(message: Any, response_type: Any, info_type: Any) -> Any:
    """Upstream's ErrorResponse for one of our errors, or None for anything else."""
    error = message if isinstance(message, PDRequestError) else getattr(message, "pd_error", None)
    if not isinstance(error, PDRequestError):
        return None
    return response_type(error=info_type(message=str(error), type=error.code, code=error.http_status))


@functools.cache
def _make_wrapper() -> Any:
    from vllm import exceptions

    graceful: Any = getattr(exceptions, "GracefulHTTPError", None)
    base: Any = graceful or exceptions.VLLMValidationError

    class PDRequestFailed(base):  # type: ignore[misc]
        """Carries a PDRequestError."""

        def __init__(self, error: PDRequestError) -> None:
            if graceful is not None:
                super().__init__(str(error), HTTPStatus(error.http_status))
            else:
                super().__init__(str(error))
            self.pd_error = error

    return PDRequestFailed
