# SPDX-License-Identifier: Apache-2.0
"""The command line of `vllm pd doctor`: this host, a way to a peer, or waiting for one that wants to look at us.

Exit code: 0 when nothing fails (warnings do not count), 1 when something does, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from vllm_ascend_pd.bench.arguments import parse_size
from vllm_ascend_pd.config import (
    HOST_TRANSPORTS,
    WILDCARD_HOSTS,
    is_loopback,
    parse_choice,
    parse_duration,
    parse_listen,
    parse_prefill_url,
    primary_host,
)
from vllm_ascend_pd.doctor.check import EXIT_FAIL, Check, Report, fail, ok
from vllm_ascend_pd.doctor.host import Host
from vllm_ascend_pd.doctor.local import LocalFacts, Wanted, check_host
from vllm_ascend_pd.doctor.peer.instance import InstanceVisit, visit_instance
from vllm_ascend_pd.doctor.peer.listener import DoctorListener
from vllm_ascend_pd.doctor.peer.path import look_at
from vllm_ascend_pd.doctor.peer.plane import MAX_BYTES
from vllm_ascend_pd.doctor.peer.visitor import Visit, Visitor
from vllm_ascend_pd.doctor.render import print_report
from vllm_ascend_pd.errors import PDConfigError, PDError
from vllm_ascend_pd.secret import SECRET_FLAG, Secret, load_secret
from vllm_ascend_pd.signals import sigterm_as_interrupt

EXIT_USAGE: Final = 2
INTERRUPTED: Final = 130
DEFAULT_TIMEOUT: Final = "30s"
DEFAULT_LISTEN_FOR: Final = "30m"
DEFAULT_BYTES: Final = "64MiB"


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    peer_url: str  # of a running instance; "" otherwise
    peer: tuple[str, int] | None  # of a doctor
    listen: tuple[str, int] | None
    pd_listen: tuple[str, int] | None
    secret_file: str | None
    num_bytes: int
    timeout_s: float
    listen_for_s: float
    transport: str
    once: bool
    as_json: bool

    @property
    def waits(self) -> bool:
        """Whether this doctor is the one that answers."""
        return self.listen is not None and self.peer is None and not self.peer_url


def build_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog="vllm pd doctor",
        description="Check this host; with --peer also the way to another one and back, with a real transfer. Says of "
        "each check: ok, warn, fail or not applicable, what was seen, what to do.",
        epilog="Exit code: 0 nothing fails, 1 something fails, 2 wrong command line.",
    )
    parser.add_argument(
        "--peer",
        metavar="URL",
        help="http://HOST:PORT of a running instance, or HOST:PORT of a doctor that was started there with --listen",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST[:PORT]",
        help="wait here for a doctor on another host; with --peer: where the peer dials back (default: the address of "
        "the way to it, any port)",
    )
    parser.add_argument(
        "--pd-listen",
        metavar="HOST[:PORT]",
        help="what `vllm serve` will get: checked, not used [env: VLLM_PD_LISTEN]",
    )
    parser.add_argument(
        "--pd-secret-file",
        metavar="PATH",
        help="the deployment's secret, as for `vllm serve` [env: VLLM_PD_SECRET_FILE]",
    )
    parser.add_argument(
        "--bytes", default=DEFAULT_BYTES, metavar="SIZE", help=f"to move each way (default: {DEFAULT_BYTES})"
    )
    parser.add_argument(
        "--timeout", default=DEFAULT_TIMEOUT, metavar="TIME", help=f"of each step (default: {DEFAULT_TIMEOUT})"
    )
    parser.add_argument(
        "--listen-for",
        default=DEFAULT_LISTEN_FOR,
        metavar="TIME",
        help=f"with --listen: stop waiting after this time (default: {DEFAULT_LISTEN_FOR})",
    )
    parser.add_argument("--once", action="store_true", help="with --listen: end after the first visit")
    parser.add_argument("--json", action="store_true", help="for programs; with --listen one document in each line")
    return parser


def read_options(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> Options:
    """Parse and check.

    Raises:
        PDConfigError: names the flag.
        SystemExit: 2, from argparse.
    """
    parsed = build_parser().parse_args(arguments)
    peer_url, peer = _parse_peer(parsed.peer)
    pd_listen = parsed.pd_listen or environ.get("VLLM_PD_LISTEN")
    options = Options(
        peer_url=peer_url,
        peer=peer,
        listen=parse_listen(parsed.listen, "--listen") if parsed.listen else None,
        pd_listen=parse_listen(pd_listen, "--pd-listen") if pd_listen else None,
        secret_file=parsed.pd_secret_file or environ.get("VLLM_PD_SECRET_FILE"),
        num_bytes=parse_size("--bytes", parsed.bytes),
        timeout_s=parse_duration(parsed.timeout, "--timeout", 0.1),
        listen_for_s=parse_duration(parsed.listen_for, "--listen-for", 0.1),
        transport=parse_choice(
            environ.get("VLLM_PD_HOST_TRANSPORT") or "auto", "VLLM_PD_HOST_TRANSPORT", HOST_TRANSPORTS
        ),
        once=parsed.once,
        as_json=parsed.json,
    )
    if options.num_bytes > MAX_BYTES:
        raise PDConfigError(f"--bytes: {parsed.bytes} is above {MAX_BYTES >> 20} MiB")
    if parsed.once and not options.waits:
        raise PDConfigError("--once goes with --listen alone")
    if options.secret_file is None:
        for flag, address in (("--listen", options.listen), ("--peer", options.peer)):
            if address is not None and not is_loopback(address[0]):
                raise PDConfigError(f"{flag} {address[0]} is not this machine alone: give {SECRET_FLAG}, alike on both")
    return options


def _parse_peer(text: str | None) -> tuple[str, tuple[str, int] | None]:
    if text is None:
        return "", None
    scheme, separator, rest = text.partition("://")
    if separator and scheme in ("http", "https"):
        return parse_prefill_url(text, "--peer"), None
    if separator and scheme != "tcp":
        raise PDConfigError(f"--peer: {text!r}: write HOST:PORT of a doctor or http://HOST:PORT of an instance")
    host, port = parse_listen(rest if separator else text, "--peer")
    if port == 0:
        raise PDConfigError(f"--peer: {text!r} has no port; the listening doctor says which it has")
    return "", (host, port)


def main(arguments: Sequence[str]) -> int:
    """Run the doctor; the exit code."""
    try:
        options = read_options(arguments)
        with sigterm_as_interrupt():
            return run(options)
    except PDConfigError as error:
        print(f"vllm pd doctor: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except PDError as error:
        print(f"vllm pd doctor: {error}", file=sys.stderr)
        return EXIT_FAIL
    except KeyboardInterrupt:
        return INTERRUPTED


def run(options: Options) -> int:
    """The local checks, then the peer's or the waiting."""
    facts = LocalFacts(Host())
    report = Report(socket.gethostname())
    if options.waits:
        return _wait(options, facts, report)
    listen = options.pd_listen or options.listen
    flag = "--listen" if options.listen and not options.pd_listen else "--pd-listen"
    report.add(check_host(facts, Wanted(listen, flag, options.secret_file)))
    if options.peer_url or options.peer:
        report.about += f" to {options.peer_url or '{}:{}'.format(*options.peer or ())}"
        report.add(_visit(options, facts))
    _tell(report, options)
    return report.exit_code


def _visit(options: Options, facts: LocalFacts) -> list[Check]:
    is_far = not is_loopback(urlsplit(options.peer_url).hostname or "localhost")
    secret = None
    if options.secret_file or not is_far:  # the per-user secret opens nothing on another machine
        try:
            secret = load_secret(options.secret_file)
        except PDConfigError as error:
            return [fail("peer.secret", str(error), "the way to a peer is not looked at without a secret")]
    if options.peer_url and secret is not None:
        options = _recognise_doctor(options)
    if options.peer_url:
        return list(visit_instance(InstanceVisit(options.peer_url, secret, facts.for_peer(), options.timeout_s)))
    assert secret is not None
    assert options.peer is not None
    visit = Visit(
        host=options.peer[0],
        port=options.peer[1],
        secret=secret,
        facts=facts.for_peer(),
        num_bytes=options.num_bytes,
        timeout_s=options.timeout_s,
        listen=options.listen,
        transport=options.transport,
    )
    return list(Visitor(visit).run())


def _recognise_doctor(options: Options) -> Options:
    """A doctor is one also when it was called http://HOST:PORT: it greets, and an HTTP server waits to be asked."""
    parts = urlsplit(options.peer_url)
    if parts.scheme != "http" or parts.hostname is None or parts.port is None:
        return options
    path = look_at(parts.hostname, parts.port, options.timeout_s, wait_greeting=True)
    if not path.is_control_plane:
        return options
    return dataclasses.replace(options, peer_url="", peer=(parts.hostname, parts.port))


# ---------------------------------------------------------------- waiting for a visitor


class _Visits:
    """Counts what visitors say at the end; told from the listener's worker thread."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.first_ended = threading.Event()
        self.num_failed = 0

    def tell(self, event: Mapping[str, Any]) -> None:
        """One event for people or programs."""
        if self._options.as_json:
            print(json.dumps(event), flush=True)
        else:
            print(_describe_event(event), flush=True)
        if event["event"] == "done":
            self.num_failed += not event["ok"]
            self.first_ended.set()


def _describe_event(event: Mapping[str, Any]) -> str:
    who = event["visitor"]
    if event["event"] == "visit":
        return f"{who} has come to look"
    if event["event"] == "done":
        return f"{who} has ended: {event['summary']}"
    if event["problem"]:
        return f"pulling from {who}: {event['problem']}"
    speed = event["num_bytes"] / max(event["seconds"], 1e-9) / 1e9
    return f"pulled {event['num_bytes'] >> 20} MiB from {who} over {event['transport']} at {speed:.2f} GB/s, verified"


def _wait(options: Options, facts: LocalFacts, report: Report) -> int:
    assert options.listen is not None
    secret: Secret = load_secret(options.secret_file)
    host, port = options.listen
    visits = _Visits(options)
    advertise = primary_host() if host in WILDCARD_HOSTS else host
    listener = DoctorListener(secret, options.listen, advertise, facts.for_peer(), visits.tell, options.transport)
    try:
        report.add(check_host(facts, Wanted((host, port), "--listen", options.secret_file)))
        try:
            port = listener.start()
        except PDConfigError as error:
            report.add([fail("network.listening", str(error).replace("--pd-listen", "--listen"), "give another one")])
            _tell(report, options)
            return report.exit_code
        report.add(
            [ok("network.listening", f"a doctor waits on {host}:{port}; on the other host: {_how(port, options)}")]
        )
        _tell(report, options)
        if options.as_json:
            print(json.dumps({"event": "listening", "host": host, "port": port}), flush=True)
        _until_done(options, visits)
    finally:
        listener.close()
    return EXIT_FAIL if report.exit_code or visits.num_failed else 0


def _how(port: int, options: Options) -> str:
    secret = f" {SECRET_FLAG} PATH" if options.secret_file else ""
    return f"vllm pd doctor --peer HOST:{port}{secret}"


def _until_done(options: Options, visits: _Visits) -> None:
    """Until the first visit has ended (--once), the time is over, or Ctrl-C."""
    deadline = time.monotonic() + options.listen_for_s
    try:
        while (left := deadline - time.monotonic()) > 0:
            if not options.once:
                threading.Event().wait(min(left, 3600.0))
            elif visits.first_ended.wait(min(left, 3600.0)):
                return
    except KeyboardInterrupt:
        return
    if options.once:
        visits.num_failed += 1  # nobody came


def _tell(report: Report, options: Options) -> None:
    if options.as_json:
        print(json.dumps(report.to_dict(), indent=None if options.waits else 2), flush=True)
    else:
        print_report(report)
