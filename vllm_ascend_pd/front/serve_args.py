# SPDX-License-Identifier: Apache-2.0
"""Checks of `vllm serve` arguments that are not engine arguments, before any process is started.

Runs once, in the command's main process, right after parsing. What it decides (the --host default, the instance's
identity) travels in the arguments to every API server process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from vllm_ascend_pd.config import PDConfig, is_loopback
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.front.flags import check_bind, read_options
from vllm_ascend_pd.front.resolve import build_config, new_instance, refuse_typed
from vllm_ascend_pd.secret import load_secret

LOOPBACK = "127.0.0.1"


def check_serve_args(args: Any) -> None:
    """Settle `--host`, refuse what does not go with `--pd-role`, and make the instance. Mutates `args`.

    Raises:
        SystemExit: status 2; the sentence is on stderr.
    """
    try:
        config = settle_serve_args(args)
        if config is not None:
            check_host(config, args)
    except PDConfigError as error:
        print(f"vllm serve: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def check_host(config: PDConfig, args: Any) -> None:
    """The cheap part of `vllm pd doctor`: log its warnings, refuse what fails. First, versions that must pair.

    Raises:
        PDConfigError: in the doctor's words.
    """
    from vllm_ascend_pd.ascend.host_facts import refuse_unpaired_host
    from vllm_ascend_pd.doctor.local import refuse_bad_start  # not imported by servers without a role
    from vllm_ascend_pd.logs import follow_vllm_logging

    follow_vllm_logging()
    refuse_unpaired_host()
    given = read_options(args)
    has_workers_only = bool(getattr(args, "headless", False))
    refuse_bad_start(config, "--pd-listen" if "listen" in given else "--host", binds=not has_workers_only)


def settle_serve_args(args: Any, environ: Mapping[str, str] = os.environ) -> PDConfig | None:
    """See `check_serve_args`; None without a role.

    Raises:
        PDConfigError: names the flag.
    """
    given = read_options(args, environ)
    if "role" not in given:
        return None
    role = given["role"]
    if environ.get("VLLM_USE_RUST_FRONTEND", "0").strip() not in ("", "0"):
        raise PDConfigError(
            f"{role.name} {role.value} needs the Python API server, and VLLM_USE_RUST_FRONTEND="
            f"{environ['VLLM_USE_RUST_FRONTEND']} bypasses it: unset VLLM_USE_RUST_FRONTEND"
        )
    _refuse_modes_without_http(args, given)
    refuse_typed(role.value, args, environ)
    if "secret-file" not in given and not getattr(args, "uds", None):
        if args.host is None:
            args.host = LOOPBACK
        check_bind(args.host, "--host", given)
    load_secret(given["secret-file"].value if "secret-file" in given else None)
    args.pd_instance = new_instance(args.host or "")
    config = build_config(given, args.pd_instance)
    if "secret-file" not in given and not is_loopback(config.listen_host):
        raise PDConfigError(f"--pd-listen {config.listen_host} is not a loopback address and there is no secret")
    return config


def _refuse_modes_without_http(args: Any, given: Mapping[str, Any]) -> None:
    role = given["role"]
    node_rank = int(getattr(args, "node_rank", 0) or 0)
    has_workers_only = bool(getattr(args, "headless", False)) and node_rank > 0
    for flag in ("grpc", "headless"):
        if getattr(args, flag, False) and not (flag == "headless" and has_workers_only):
            raise PDConfigError(
                f"{role.name} {role.value} needs the HTTP API server, and --{flag} runs without it"
                + (" (only nodes of --node-rank 1 and up, which hold workers alone, do)" if flag == "headless" else "")
            )
    if has_workers_only and ("secret-file" not in given or not args.host or args.host == "0.0.0.0"):
        missing = "--pd-secret-file, the same as on node 0" if "secret-file" not in given else "--host"
        raise PDConfigError(
            f"{role.name} {role.value} on --node-rank {node_rank} needs {missing}: other instances reach this node's "
            "ranks at the address of --host"
        )
