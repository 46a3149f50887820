# SPDX-License-Identifier: Apache-2.0
"""What an instance was told on its command line: `PDRole`, `PDConfig`, and the parsing of single values.

Owns no thread and imports no vLLM. Filled by `front/flags.py` from flags and environment, carried to every
process of the instance in `kv_transfer_config.kv_connector_extra_config["pd"]`, read by the connector
and by the API servers.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final
from urllib.parse import urlsplit

from vllm_ascend_pd.errors import PDConfigError, nearest

EXTRA_CONFIG_KEY: Final = "pd"
LOAD_FAILURE_POLICIES: Final = ("reprefill", "recompute", "fail")
HOST_TRANSPORTS: Final = ("auto", "mapped", "tcp")
VERIFY_MODES: Final = ("off", "checksum")
TRANSFER_MODES: Final = ("auto", "straight", "staged")
WILDCARD_HOSTS: Final = ("0.0.0.0", "::")
DNS_SCHEME: Final = "dns+http"

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s|m)?")
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0}
_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\.?")
_MAX_DURATION_S: Final = 86400.0


class PDRole(str, Enum):
    """The side of prefill/decode disaggregation that an instance plays."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def kv_role(self) -> str:
        """Upstream's word for it (`KVTransferConfig.kv_role`).

        A producer's blocks outlive the request; a consumer gets deferred block frees, so that a load never
        lands in a block that a step in flight still writes.
        """
        return "kv_producer" if self is PDRole.PREFILL else "kv_consumer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PDConfig:
    """One instance's PD settings. All values are validated; durations are in seconds."""

    role: PDRole
    engine_id: str
    epoch: str  # random per process start
    runtime_dir: str  # private (0700): the sockets of this instance
    prefill_urls: tuple[str, ...] = ()  # decode: http(s)://host:port or dns+http://name:port
    listen_host: str = "127.0.0.1"  # where the engine core's peer socket is bound
    listen_port: int = 0  # 0: chosen by the operating system
    secret_file: str = ""  # "": the per-user file; then everything stays on loopback
    load_failure: str = "reprefill"
    require_remote_kv: bool = False
    lease_s: float = 30.0
    deadline_s: float = 60.0  # how long a request on D waits for remote KV, all attempts together
    start_timeout_s: float = 600.0
    verify: str = "off"
    transfer: str = "auto"
    host_transport: str = "auto"
    rank_table: str = ""  # path; "": devices are read from the system
    http_host: str = ""  # what the API server binds, where it is known

    @property
    def core_address(self) -> str:
        """The local plane's socket of this instance's engine core."""
        return f"ipc://{self.runtime_dir}/core.sock"

    @property
    def advertise_host(self) -> str:
        """The host under which peers dial this engine core; never a wildcard."""
        return primary_host() if self.listen_host in WILDCARD_HOSTS else self.listen_host

    @property
    def static_prefill_urls(self) -> tuple[str, ...]:
        """The prefill instances that are named themselves, not through DNS."""
        return tuple(url for url in self.prefill_urls if not url.startswith(DNS_SCHEME))

    @property
    def lease_ms(self) -> int:
        """`lease_s` for the wire."""
        return round(self.lease_s * 1000)

    @property
    def deadline_ms(self) -> int:
        """`deadline_s` for the wire."""
        return round(self.deadline_s * 1000)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able form, for `kv_connector_extra_config`."""
        return {
            **dataclasses.asdict(self),
            "role": self.role.value,
            "prefill_urls": list(self.prefill_urls),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PDConfig:
        """The inverse of `to_dict`.

        Raises:
            PDConfigError: a key that does not exist or is missing, or a role that is neither.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise PDConfigError(f"PD config: unknown key {key!r}{nearest(key, known)}")
        required = [name for name, field in known.items() if field.default is dataclasses.MISSING]
        missing = [name for name in required if name not in values]
        if missing:
            raise PDConfigError(f"PD config: missing key {', '.join(map(repr, missing))}")
        role = parse_choice(values["role"], "PD config: role", [role.value for role in PDRole])
        return cls(
            **{
                **values,
                "role": PDRole(role),
                "prefill_urls": tuple(values.get("prefill_urls", ())),
            }
        )


def pd_config_of(vllm_config: Any) -> PDConfig | None:
    """The PDConfig that a VllmConfig carries, or None when PD is off."""
    transfer_config = getattr(vllm_config, "kv_transfer_config", None)
    if transfer_config is None:
        return None
    values = (transfer_config.kv_connector_extra_config or {}).get(EXTRA_CONFIG_KEY)
    return None if values is None else PDConfig.from_dict(values)


# ---------------------------------------------------------- single values; `name` is the flag or variable


def parse_choice(value: object, name: str, choices: list[str] | tuple[str, ...]) -> str:
    """`value` if it is one of `choices`."""
    text = value.value if isinstance(value, Enum) else value
    if isinstance(text, str) and text in choices:
        return text
    hint = nearest(text, choices) if isinstance(text, str) else ""
    raise PDConfigError(f"{name}: {text!r} is not one of {', '.join(choices)}{hint}")


def parse_duration(value: object, name: str, minimum_s: float = 0.001) -> float:
    """Seconds from `30`, `30s`, `500ms`, `2m`, or a number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise PDConfigError(f"{name}: {value!r} is not a duration; write 30, 30s, 500ms or 2m")
    text = str(value).strip()
    if text.startswith("-"):
        raise PDConfigError(f"{name}: {text} is negative; the least is {minimum_s:g}s")
    match = _DURATION.fullmatch(text)
    if match is None:
        raise PDConfigError(f"{name}: {text!r} is not a duration; write 30, 30s, 500ms or 2m")
    seconds = float(match["number"]) * _UNIT_S[match["unit"] or "s"]
    if not minimum_s <= seconds <= _MAX_DURATION_S:
        raise PDConfigError(f"{name}: {text} is outside {minimum_s:g}s to {_MAX_DURATION_S:g}s")
    return seconds


def parse_flag(value: object, name: str) -> bool:
    """A switch: true for 1, true, yes, on; false for 0, false, no, off."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise PDConfigError(f"{name}: {value!r} is not a switch; write 1 or 0")


def parse_listen(value: object, name: str) -> tuple[str, int]:
    """(host, port) from `HOST`, `HOST:PORT`, `[V6]`, `[V6]:PORT` or a bare IPv6 address; port 0: left out."""
    text = str(value).strip()
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise PDConfigError(f"{name}: {text!r} is not [IPV6][:PORT], for example [::1]:8200")
        port = rest[1:] if rest else None
    elif text.count(":") > 1:
        host, port = text, None
    else:
        host, colon, after = text.partition(":")
        port = after if colon else None
    if host == "*":
        raise PDConfigError(f"{name}: write 0.0.0.0 (or ::) in {text!r} to listen on all interfaces")
    check_host(host, name, text)
    return host, 0 if port is None else parse_port(port, name, text)


def parse_port(port: str, name: str, text: str) -> int:
    """A TCP port number, 1 to 65535."""
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise PDConfigError(f"{name}: port {port!r} in {text!r} is not a number from 1 to 65535")
    return int(port)


def check_host(host: str, name: str, text: str) -> None:
    """Refuse what is neither a host name nor an IP address."""
    if not host:
        raise PDConfigError(f"{name}: {text!r} has no host")
    if re.fullmatch(r"[\d.]+", host) or ":" in host:
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError as error:
            raise PDConfigError(f"{name}: {host!r} in {text!r} is not an IP address: {error}") from None
    elif _HOSTNAME.fullmatch(host) is None:
        raise PDConfigError(f"{name}: {host!r} in {text!r} is not a host name or IP address")


def parse_prefill_url(value: object, name: str) -> str:
    """A prefill instance's base URL without a trailing slash."""
    text = str(value).strip()
    if "://" not in text:
        raise PDConfigError(f"{name}: {text!r} is not a URL; did you mean 'http://{text}'?")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise PDConfigError(f"{name}: {text!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https", DNS_SCHEME):
        raise PDConfigError(
            f"{name}: scheme {parts.scheme!r} in {text!r} is not http, https or {DNS_SCHEME}"
            f"{nearest(parts.scheme, ['http', 'https', DNS_SCHEME])}"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise PDConfigError(f"{name}: {text!r} must be scheme://host:port with nothing else")
    check_host(host or "", name, text)
    if port is None and parts.scheme != "https":
        raise PDConfigError(f"{name}: {text!r} has no port; the default of `vllm serve` is 8000")
    if port == 0:
        raise PDConfigError(f"{name}: port '0' in {text!r} is not a number from 1 to 65535")
    shown = f"[{host}]" if ":" in (host or "") else host
    return f"{parts.scheme}://{shown}{'' if port is None else f':{port}'}{parts.path.rstrip('/')}"


# ------------------------------------------------------------------ hosts


def is_loopback(host: str) -> bool:
    """Whether an address to bind is reachable from this machine only."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def primary_host() -> str:
    """This machine's address as others see it: `VLLM_HOST_IP`, else the source address of the default route.

    Connecting a UDP socket sends nothing.
    """
    if configured := os.environ.get("VLLM_HOST_IP"):
        return configured
    for family, probe in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as udp:
                udp.connect((probe, 9))
                return str(udp.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
