# SPDX-License-Identifier: Apache-2.0
"""`endpoints.md`: our HTTP endpoints, from the routers' decorators, and what of vLLM's own is changed."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from tools.reference.markdown import code, first_paragraph, page, table
from tools.reference.sources import PACKAGE, called_name, calls, constants, module_paths, parse
from vllm_ascend_pd.front.http_messages import MAX_BODY_BYTES
from vllm_ascend_pd.secret import AUTH_HEADER

_METHODS = ("get", "post", "put", "delete")


@dataclass(frozen=True)
class Endpoint:
    """One path and method."""

    method: str
    path: str
    roles: str
    signed: bool
    text: str


@functools.cache
def find_endpoints() -> list[Endpoint]:
    """All that a router of ours answers, sorted by path."""
    paths = constants(parse(PACKAGE / "front/http_messages.py"))
    found = []
    for file in module_paths():
        if "APIRouter" not in file.read_text():
            continue
        tree = parse(file)
        known = {**paths, **constants(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
                found += list(_endpoints(node, known))
    return sorted(found, key=lambda endpoint: (endpoint.path, endpoint.method))


def _endpoints(function: ast.AsyncFunctionDef | ast.FunctionDef, known: dict[str, str]) -> Iterator[Endpoint]:
    for decorator in function.decorator_list:
        if not isinstance(decorator, ast.Call) or called_name(decorator) not in _METHODS or not decorator.args:
            continue
        first = decorator.args[0]
        path = known.get(first.id, first.id) if isinstance(first, ast.Name) else getattr(first, "value", "?")
        called = {called_name(call) for call in calls(function, "_signed_body", "_server")}
        yield Endpoint(
            called_name(decorator).upper(),
            str(path),
            "prefill" if "_server" in called else "both",
            "_signed_body" in called,
            first_paragraph(ast.get_docstring(function)),
        )


def render() -> str:
    """The page."""
    rows = [
        (
            endpoint.method,
            code(endpoint.path),
            endpoint.roles,
            f"signed ({code(AUTH_HEADER)})" if endpoint.signed else "none",
            endpoint.text,
        )
        for endpoint in find_endpoints()
    ]
    return page(
        "HTTP endpoints",
        "Added to those of `vllm serve`, on the same port. Without `--pd-role` they answer 404.",
        table(("method", "path", "role", "who may ask", "what it answers"), rows),
        f"A signed request carries `{AUTH_HEADER}: v1 NONCE SIGNATURE`: HMAC-SHA256 under a key derived from the "
        "deployment's secret, over method, path, body, nonce and the epoch of the instance that is asked. A "
        "nonce works "
        f"once. A body has at most {MAX_BODY_BYTES >> 20} MiB. Only instances of this distribution and "
        "`vllm pd drain` send these requests; clients never do. `--api-key` of vLLM guards its own API (`/v1` and so "
        "on) and not these paths.",
        '`/health` is vLLM\'s, extended: it answers 503 with `{"problems": [sentence, …]}` when the engine core '
        "does not "
        "answer within 5 s, when a supervised thread of the connector is dead or stuck on any rank, and, on a decode "
        "instance with `--pd-require-remote-kv` and `--pd-prefill`, when no prefill instance is reachable. "
        "`/metrics` is vLLM's, with [our metrics](metrics.md).",
        "Requests to vLLM's own API may carry `kv_transfer_params`, as routers of the two-phase protocol send them: "
        "`do_remote_decode` to a prefill instance (its answer has the signed handoff), `do_remote_prefill` with that "
        "handoff to a decode instance. On the wrong role they are answered 400 `pd_wrong_role`. What else is wrong "
        "with a handoff is a reason of [`vllm:pd_remote_kv_fallback_total`](metrics.md).",
    )
