# SPDX-License-Identifier: Apache-2.0
"""The deployment's secret: there, readable by its owner only, long enough, given where it is needed."""

from __future__ import annotations

from vllm_ascend_pd.config import is_loopback
from vllm_ascend_pd.doctor.check import Check, fail, not_applicable, ok
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.secret import SECRET_FLAG, load_secret


def check_secret(path: str | None, listen_host: str | None) -> Check:
    """Does not show the secret; a digest of it is compared with the peer's by the connection itself."""
    key = "secret.file"
    if path:
        try:
            secret = load_secret(path)
        except PDConfigError as error:
            return fail(key, str(error), "repair the file; all instances need a copy with the same content")
        return ok(key, f"{SECRET_FLAG} {path}: {len(secret.value)} bytes, readable by its owner only")
    if listen_host is not None and not is_loopback(listen_host):
        return fail(
            key,
            f"--listen {listen_host} is reachable from other machines and there is no {SECRET_FLAG}",
            f"openssl rand -hex 32 > secret; chmod 600 secret; give {SECRET_FLAG} secret on all hosts",
        )
    return not_applicable(
        key, f"no {SECRET_FLAG}: everything stays on this machine's loopback, under a per-user secret"
    )
