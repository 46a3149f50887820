# SPDX-License-Identifier: Apache-2.0
"""A running instance as the peer: what it says over HTTP, and whether its control and data planes can be reached.

Changes nothing there. The handshake is tried with a record that has no model: the instance refuses it by the first
field that differs, which tells the secret and the versions. A transfer needs a doctor on that host.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from vllm_ascend_pd.config import is_loopback
from vllm_ascend_pd.control.client import ControlClient
from vllm_ascend_pd.control.endpoint import join_tcp
from vllm_ascend_pd.doctor.check import Check, fail, not_applicable, ok, warn
from vllm_ascend_pd.doctor.peer.path import look_at
from vllm_ascend_pd.errors import PDUnreachableError
from vllm_ascend_pd.secret import SECRET_FLAG, Secret
from vllm_ascend_pd.wire import WIRE_VERSION, Hello, HelloReply, Refused

STATUS_PATH: Final = "/pd/status"
HEALTH_PATH: Final = "/health"
HELLO_TIMEOUT_S: Final = 5.0
VERSION_FIELDS: Final = ("wire_version", "vllm_version", "fork_version")  # the first ones that are compared
_DOCTOR_THERE: Final = "beside the instance, on that host: vllm pd doctor --listen HOST:PORT; then --peer HOST:PORT"


@dataclass(frozen=True)
class InstanceVisit:
    """What to do."""

    url: str
    secret: Secret | None  # None: none was given, and the peer is on another machine
    facts: Mapping[str, Any]
    timeout_s: float


def visit_instance(visit: InstanceVisit) -> Iterator[Check]:
    """All checks towards a running instance, in order."""
    status, check = _fetch_status(visit)
    yield check
    if status is None:
        return
    yield _check_health(visit)
    if status.get("role") != "prefill":
        yield not_applicable("peer.control-plane", "a decode instance dials out and is not dialled")
    else:
        yield from _check_planes(visit, status)
    yield not_applicable("peer.dial-back", f"an instance does not dial on command; {_DOCTOR_THERE}")
    yield not_applicable("transfer.from-peer", f"moves nothing beside a running engine; {_DOCTOR_THERE}")


def _fetch_status(visit: InstanceVisit) -> tuple[dict[str, Any] | None, Check]:
    key, where = "peer.reachable", f"{visit.url}{STATUS_PATH}"
    try:
        with httpx.Client(trust_env=False, timeout=visit.timeout_s) as client:
            answer = client.get(where)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return None, fail(key, f"{where}: {_why(visit, error)}", "check that it runs, the address and the firewall")
    if answer.status_code == 404:
        return None, fail(
            key, f"{where} is not there", "the server runs without --pd-role, or is not ours: start it so"
        )
    try:
        status = json.loads(answer.content)
    except ValueError:
        status = None
    if not isinstance(status, dict) or not isinstance(status.get("role"), str):
        return None, fail(key, f"{where} answers {answer.status_code} and no status", "give the API server's address")
    core = f"; engine core: {status['engine_core']}" if "engine_core" in status else ""
    if answer.status_code != 200:
        return None, fail(key, f"{where} answers {answer.status_code}{core}", "look at the instance's log")
    return status, ok(key, f"{visit.url} is a {status['role']} instance, engine {status.get('engine_id')}")


def _why(visit: InstanceVisit, error: Exception) -> str:
    """Of a failed request; a doctor or an engine core's control plane is known by its greeting."""
    parts = urlsplit(visit.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    path = look_at(parts.hostname or "", port, visit.timeout_s, wait_greeting=True)
    if path.is_control_plane:
        return f"that is a doctor or an engine core's control plane: give --peer {parts.hostname}:{port}"
    return path.problem or str(error) or type(error).__name__


def _check_health(visit: InstanceVisit) -> Check:
    key = "peer.health"
    try:
        with httpx.Client(trust_env=False, timeout=visit.timeout_s) as client:
            answer = client.get(visit.url + HEALTH_PATH)
    except httpx.HTTPError as error:
        return fail(key, f"{HEALTH_PATH}: {error}", "look at the instance's log")
    if answer.status_code != 200:
        return fail(key, f"{HEALTH_PATH} answers {answer.status_code}: {answer.text[:300]}", "look at its log")
    return ok(key, "healthy")


def _check_planes(visit: InstanceVisit, status: Mapping[str, Any]) -> Iterator[Check]:
    control = status.get("control") or {}
    host, port = str(control.get("host", "")), int(control.get("port") or 0)
    key = "peer.control-plane"
    if not host or not port:
        yield fail(key, "the instance does not say where its control plane is", "use one release on both sides")
        return
    asked = urlsplit(visit.url).hostname or ""
    if is_loopback(host) and not is_loopback(asked):
        yield fail(
            key,
            f"{asked} announces {host}:{port}, which is this host from here",
            f"start it with --pd-listen ADDRESS (and {SECRET_FLAG}), the address that decode instances use",
        )
        return
    problem = look_at(host, port, visit.timeout_s).problem
    if problem:
        yield fail(key, f"{host}:{port}: {problem}", "open the port of --pd-listen in the firewall, from here to there")
        return
    yield ok(key, f"{host}:{port} accepts connections")
    yield from _check_hello(visit, host, port)
    yield _check_ranks(visit, status)


def _check_hello(visit: InstanceVisit, host: str, port: int) -> Iterator[Check]:
    key = "peer.secret"
    if visit.secret is None:
        yield not_applicable(key, f"no {SECRET_FLAG} was given: the handshake was not tried")
        return
    record = {name: visit.facts.get(name) for name in VERSION_FIELDS}
    hello = Hello(wire_version=WIRE_VERSION, engine_id="pd-doctor", epoch="doctor", record=record)
    client = ControlClient(join_tcp(host, port), visit.secret)
    try:
        answer = client.request(hello, min(HELLO_TIMEOUT_S, visit.timeout_s))
    except PDUnreachableError as error:
        yield fail(key, str(error), f"copy the file of {SECRET_FLAG} from one host to the other")
        return
    finally:
        client.close()
    yield ok(key, "the same on both sides")
    key = "peer.versions"
    if isinstance(answer, Refused) and answer.field in VERSION_FIELDS:
        yield fail(
            key,
            f"{answer.field} is {answer.theirs} here and {answer.ours} there",
            "install the same release of vllm-ascend-pd on both; the handshake refuses this",
        )
    elif isinstance(answer, (Refused, HelloReply)):
        shown = ", ".join(f"{name} {value}" for name, value in record.items())
        yield ok(key, f"{shown} on both sides; the model's fields are compared by the engines themselves")
    else:
        yield warn(key, f"unexpected answer {type(answer).__name__}", "use one release on both sides")


def _check_ranks(visit: InstanceVisit, status: Mapping[str, Any]) -> Check:
    key, found = "peer.data-plane", []
    links = [link for link in status.get("links") or () if isinstance(link, dict)]
    for link in links:
        host, port = str(link.get("host", "")), int(link.get("port") or 0)
        if problem := look_at(host, port, visit.timeout_s).problem if port else "":
            found.append(f"rank {link.get('tp_rank')} at {host}:{port}: {problem}")
    if found:
        return fail(key, "; ".join(found[:8]), "allow all TCP ports from decode hosts to prefill hosts in the firewall")
    if not links:
        return warn(key, "the instance names no rank yet", "it may be starting: run again")
    return ok(key, f"{len(links)} ranks accept connections")
