# SPDX-License-Identifier: Apache-2.0
"""Edits to `create_error_response`: typed PD errors keep their code.

Why here      All endpoints and all streams make their errors here; upstream maps by its own classes only.
What it does  An exception that carries a PDRequestError becomes its status and code (`pd_kv_unavailable`,
              `pd_deadline`), also as an SSE event of a stream that has begun.
Kind          plug-in point missing upstream        Forwarded  no
Drop when     Upstream's error classes carry a machine-readable code.
"""

from tools.fork import AddImport, InsertFirst

UPSTREAM = (
    "vllm/entrypoints/serve/exception_handling/error_response.py",
    "vllm/entrypoints/serve/utils/error_response.py",
)

EDITS = (
    AddImport("from vllm_ascend_pd.front.engine_errors import pd_error_response"),
    InsertFirst(
        "if (pd_error := pd_error_response(message, ErrorResponse, ErrorInfo)) is not None:\n    return pd_error",
        scope="create_error_response",
    ),
)
