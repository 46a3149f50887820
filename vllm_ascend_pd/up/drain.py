# SPDX-License-Identifier: Apache-2.0
"""`vllm pd drain URL`: an instance takes no new requests, and this waits until it has ended those that it has.

For a `preStop` hook, or before maintenance. What is left is read from `/pd/status`, as anybody can.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx

from vllm_ascend_pd.errors import PDAuthError, PDUnreachableError
from vllm_ascend_pd.secret import SECRET_FLAG, load_secret, sign_request
from vllm_ascend_pd.up.status import TIMEOUT_S, fetch_status

PATH: Final = "/pd/drain"
POLL_S: Final = 0.5


@dataclass(frozen=True)
class DrainOptions:
    """The command line."""

    url: str
    secret_file: str | None = None  # None: the per-user secret
    timeout_s: float = 60.0  # 0: do not wait
    undo: bool = False


def drain(
    options: DrainOptions,
    say: Callable[[str], object] = print,
    fetch: Callable[[str], dict[str, Any]] = fetch_status,
    pause: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """The exit code: 0 when nothing is left (or nobody waits), 1 when the time was not enough.

    Raises:
        PDUnreachableError: nothing answers there, or no instance with a PD role.
        PDAuthError: it does not take our secret.
        PDConfigError: the secret's file.
    """
    status = fetch(options.url)
    send(options, str(status.get("epoch", "")))
    if options.undo:
        say(f"{options.url} takes requests again")
        return 0
    until, said = clock() + options.timeout_s, ""
    while left := describe_left(fetch(options.url)):
        if options.timeout_s <= 0:
            say(f"{options.url} takes no new requests; left: {left}")
            return 0
        if clock() >= until:
            say(f"{options.url} is not empty after {options.timeout_s:g} s: {left}. They go on; nothing was stopped")
            return 1
        if left != said:
            say(f"{options.url}: waiting for {left}")
            said = left
        pause(POLL_S)
    say(f"{options.url} is drained")
    return 0


def send(options: DrainOptions, epoch: str) -> None:
    """One signed request to the process life that `epoch` names. Raises as `drain`."""
    where = f"{options.url.rstrip('/')}{PATH}"
    body = json.dumps({"draining": not options.undo}).encode()
    headers = sign_request(load_secret(options.secret_file), "POST", PATH, body, epoch)
    try:
        with httpx.Client(trust_env=False, timeout=TIMEOUT_S) as client:
            answer = client.post(where, content=body, headers={**headers, "content-type": "application/json"})
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PDUnreachableError(f"{where} does not answer ({error})") from error
    if answer.status_code == 401:
        used = f"{SECRET_FLAG} {options.secret_file}" if options.secret_file else "this user's own secret"
        raise PDAuthError(f"{where} does not take {used}: give the {SECRET_FLAG} that the instance was started with")
    if answer.status_code != 200:
        raise PDUnreachableError(f"{where} answers {answer.status_code}: {answer.text[:200]}")


def describe_left(status: Mapping[str, Any]) -> str:
    """What an instance still has to do, in words; empty when nothing."""
    parts = {
        "requests": int(status.get("requests", {}).get("unfinished", 0)),
        "leases": int(status.get("leases", {}).get("held", 0)),
        "requests that wait for KV": int(status.get("api_server", {}).get("waiting_for_kv", 0)),
        "prefills": int(status.get("api_server", {}).get("prefills_in_flight", 0)),
    }
    return ", ".join(f"{number} {what}" for what, number in parts.items() if number)
