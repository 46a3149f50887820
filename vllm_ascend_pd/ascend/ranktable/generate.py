# SPDX-License-Identifier: Apache-2.0
"""`vllm pd ranktable generate`: discover, give roles, gather other hosts, write. Main thread.

Messages go to stderr; the table goes to `--output`, else to stdout.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vllm_ascend_pd.ascend.devices import Inventory, System, inventory, npu_health, to_addresses
from vllm_ascend_pd.ascend.ranktable.build import from_devices, groups_table, roles_table
from vllm_ascend_pd.ascend.ranktable.gather import MAX_HOSTS, Collector, Offer, make_offer, send_offer
from vllm_ascend_pd.ascend.ranktable.model import FORMATS, RankTable
from vllm_ascend_pd.ascend.ranktable.show import printable
from vllm_ascend_pd.ascend.ranktable.write import write_table
from vllm_ascend_pd.config import is_loopback
from vllm_ascend_pd.errors import PDConfigError, PDError
from vllm_ascend_pd.secret import SECRET_FLAG, Secret, load_secret
from vllm_ascend_pd.wire import DeviceAddress

SECRET_VARIABLE: Final = "VLLM_PD_SECRET_FILE"
TIMEOUT_S: Final = 300.0
# CANN's transports and HCCL take ports of this range by themselves.
_CANN_PORTS: Final = range(20000, 36000)


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of `generate`."""
    roles = parser.add_argument_group("this host's devices")
    roles.add_argument("--prefill", type=_count, metavar="N", help="the first N devices prefill")
    roles.add_argument("--decode", type=_count, metavar="N", help="the next N devices decode")
    roles.add_argument(
        "--devices",
        type=_id_list,
        metavar="A,B,…",
        help="only these, by logical id, in this order (default: all visible)",
    )
    roles.add_argument("--server-id", default="", metavar="TEXT", help="name of this host (default: its address)")
    roles.add_argument(
        "--network",
        choices=("auto", "hccs", "roce"),
        default="auto",
        help="whose address: of the super node (A3) or of the chip's own port (default: hccs on A3, roce on A2)",
    )
    roles.add_argument(
        "--without-ip", action="store_true", help="accept devices without IP address: all links stay on one server"
    )
    table = parser.add_argument_group("the table")
    table.add_argument(
        "--format",
        choices=FORMATS,
        help="pair: server_list; roles: prefill_device_list and decode_device_list; groups: server_group_list "
        "(default: roles with --prefill or --decode, else pair)",
    )
    table.add_argument("--router", default="", metavar="HOST", help="groups: the router's host (default: this one)")
    table.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    several = parser.add_argument_group("several hosts")
    several.add_argument("--collect", type=_address, metavar="HOST:PORT", help="listen here for the other hosts")
    several.add_argument("--hosts", type=_count, metavar="N", help="with --collect: how many hosts in all")
    several.add_argument("--send-to", type=_address, metavar="HOST:PORT", help="where the collecting host listens")
    several.add_argument(SECRET_FLAG, type=Path, metavar="FILE", help=f"the deployment's secret (or {SECRET_VARIABLE})")
    several.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help=f"default: {TIMEOUT_S:.0f}"
    )


def run_generate(parsed: argparse.Namespace, system: System) -> int:
    """Write the table; 0, or an error is raised."""
    _check_flags(parsed)
    offer = _own_offer(parsed, system)
    if parsed.send_to:
        host, port = parsed.send_to
        text = send_offer(host, port, _secret(parsed, system, host), offer, parsed.timeout, _say)
    elif parsed.collect:
        text = _collect(parsed, system, offer)
    else:
        text = write_table(_build(parsed, [offer]))
    if parsed.output is None:
        sys.stdout.write(text)
    else:
        _write_file(parsed.output, text)
        _say(f"wrote {parsed.output}")
    return 0


def _check_flags(parsed: argparse.Namespace) -> None:
    if parsed.collect and parsed.send_to:
        raise PDConfigError("--collect and --send-to exclude each other; one host collects, the others send")
    if bool(parsed.collect) != bool(parsed.hosts):
        raise PDConfigError("--collect HOST:PORT and --hosts N belong together; --hosts counts this host too")
    if parsed.hosts and not 2 <= parsed.hosts <= MAX_HOSTS:
        raise PDConfigError(f"--hosts {parsed.hosts}: 2 to {MAX_HOSTS} hosts can be collected")
    if not 0 < parsed.timeout <= 86400:
        raise PDConfigError(f"--timeout {parsed.timeout:g}: give 1 to 86400 seconds")
    if parsed.router and parsed.format != "groups":
        raise PDConfigError("--router belongs to --format groups; leave it out")
    if parsed.send_to and (parsed.format or parsed.router):
        raise PDConfigError("--format and --router are for the collecting host; leave them out with --send-to")
    if parsed.send_to and not parsed.send_to[1]:
        raise PDConfigError("--send-to needs the port of the collecting host")
    if parsed.collect and parsed.collect[1] in _CANN_PORTS:
        _say(f"--collect: port {parsed.collect[1]} is among those that CANN takes by itself (20000 to 35999)")


def _own_offer(parsed: argparse.Namespace, system: System) -> Offer:
    """This host's devices with their roles; warnings on stderr."""
    found = inventory(system, only=parsed.devices, network=parsed.network)
    devices = to_addresses(
        found, system, only=parsed.devices, server_id=parsed.server_id, require_ip=not parsed.without_ip
    )
    if parsed.devices is not None:
        devices.sort(key=lambda device: parsed.devices.index(device.logical_id))
    _warn(system, found, devices, "no_ip" if parsed.without_ip else "")
    prefill, decode = parsed.prefill or 0, parsed.decode or 0
    if prefill + decode > len(devices):
        raise PDConfigError(
            f"--prefill {prefill} and --decode {decode} need {prefill + decode} devices, this host has {len(devices)}"
        )
    rest = devices[prefill + decode :]
    if prefill + decode and rest:
        _say(f"{len(rest)} devices have no role and are left out: NPU {', '.join(str(d.physical_id) for d in rest)}")
        rest = []
    return make_offer(devices[:prefill], devices[prefill : prefill + decode], rest)


def _warn(system: System, found: Inventory, devices: Sequence[DeviceAddress], accepted: str) -> None:
    """Findings and health of the chosen devices: a table with a sick device is written all the same."""
    chosen = {device.physical_id for device in devices}
    for finding in (finding for finding in found.findings if not accepted or finding.code != accepted):
        _say(f"{finding.level}: {finding}")
    for health in npu_health(found, system):
        if health.device.physical_id in chosen and health.status and not health.ok:
            _say(f"warn: NPU {health.device.physical_id} is {health.status} {health.detail}: leave it out (--devices)")


def _collect(parsed: argparse.Namespace, system: System, offer: Offer) -> str:
    host, port = parsed.collect
    with Collector(host, port, _secret(parsed, system, host), offer, parsed.hosts, _say) as collector:
        _say(f"collecting on {host}:{collector.port}; on the others: --send-to <this host>:{collector.port}")
        _say(f"1/{parsed.hosts} {offer.describe()}")
        offers = collector.collect(parsed.timeout)
        try:
            text = write_table(_build(parsed, offers))
        except PDError as error:
            collector.decline(f"no table could be made: {error}")
            raise
        collector.hand_out(text)
        return text


def _build(parsed: argparse.Namespace, offers: Sequence[Offer]) -> RankTable:
    """All hosts' prefill devices, then all decode devices, then those without a role."""
    prefill = [device for offer in offers for device in offer.prefill]
    decode = [device for offer in offers for device in offer.decode]
    others = [device for offer in offers for device in offer.others]
    wanted = parsed.format or ("roles" if prefill or decode else "pair")
    if wanted == "pair":
        return from_devices([*prefill, *decode, *others])
    idle = [offer.server_id for offer in offers if offer.others]
    if idle:
        raise PDConfigError(f"host {idle[0]} gave its devices no role; give --prefill or --decode there")
    if not prefill or not decode:
        missing = "--prefill" if not prefill else "--decode"
        raise PDConfigError(f"--format {wanted} needs devices of both roles, and no host gave {missing}")
    if wanted == "roles":
        return roles_table(prefill, decode)
    return groups_table(parsed.router or offers[0].server_id, prefill, decode)


def _secret(parsed: argparse.Namespace, system: System, host: str) -> Secret:
    path = parsed.pd_secret_file or system.environ.get(SECRET_VARIABLE) or None
    if path is None and not is_loopback(host):
        raise PDConfigError(f"{host} is another machine's way to here: give the same {SECRET_FLAG} on all hosts")
    return load_secret(path)


def _write_file(path: Path, text: str) -> None:
    """Whole or not at all; a table that was there is replaced."""
    directory = path.parent
    try:
        descriptor, draft = tempfile.mkstemp(dir=directory, prefix=f".{path.name}-")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(draft, 0o644)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        raise PDConfigError(f"--output {path}: cannot be written: {error.strerror}; does {directory} exist?") from error


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text[:6]) <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 to 4096")
    return int(text[:6])


def _id_list(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) <= 4 for word in words) or len(set(words)) != len(words):
        raise argparse.ArgumentTypeError(f"{text!r}: write different ids, as 0,1,2")
    return [int(word) for word in words]


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port[:6]) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
