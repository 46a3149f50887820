# SPDX-License-Identifier: Apache-2.0
"""The `--pd-*` flags and their `VLLM_PD_…` twins: one table, from which the argparse group, the environment
and the validation follow.

Runs in whichever process builds the engine arguments. A flag wins over its variable, and an error names the
one that was used. Next in the reading order: `resolve.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from vllm_ascend_pd import config
from vllm_ascend_pd.config import PDRole, is_loopback, parse_choice, parse_duration
from vllm_ascend_pd.errors import PDConfigError, nearest

GROUP_TITLE: Final = "prefill/decode disaggregation"
GROUP_DESCRIPTION: Final = (
    "Run prefill and decode in separate instances; the KV cache moves between them. "
    "Durations are 30, 30s, 500ms or 2m. Every flag has an environment twin VLLM_PD_…; the flag wins."
)
ENV_PREFIX: Final = "VLLM_PD_"


@dataclasses.dataclass(frozen=True)
class PDOption:
    """One flag. `parse(value, name)` validates it; `name` is the flag or variable that the user wrote."""

    word: str  # --pd-<word>, pd_<word>, VLLM_PD_<WORD>
    field: str  # of PDConfig; "" where none keeps it
    help: str
    parse: Callable[[object, str], Any]
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    kind: str = "value"  # value, list, switch
    only: PDRole | None = None  # refused in the other role

    @property
    def flag(self) -> str:
        """As on the command line."""
        return f"--pd-{self.word}"

    @property
    def attribute(self) -> str:
        """As in EngineArgs."""
        return f"pd_{self.word.replace('-', '_')}"

    @property
    def variable(self) -> str:
        """As in the environment."""
        return f"{ENV_PREFIX}{self.word.replace('-', '_').upper()}"


def _choice(*choices: str) -> Callable[[object, str], str]:
    return lambda value, name: parse_choice(value, name, choices)


def _one_of(carried: tuple[str, ...], choices: tuple[str, ...]) -> Callable[[object, str], str]:
    """A choice of which some are planned and not in this release."""

    def parse(value: object, name: str) -> str:
        text = parse_choice(value, name, choices)
        if text not in carried:
            raise PDConfigError(f"{name}: {text!r} is not in this release; use {' or '.join(carried)}")
        return text

    return parse


def _path(value: object, name: str) -> str:
    if not str(value).strip():
        raise PDConfigError(f"{name}: the path is empty")
    return os.path.abspath(os.path.expanduser(str(value)))


def _urls(value: object, name: str) -> tuple[str, ...]:
    texts = re.split(r"[,\s]+", value.strip()) if isinstance(value, str) else list(value)  # type: ignore[call-overload]
    urls = [config.parse_prefill_url(text, name) for text in texts if text]
    if not urls:
        raise PDConfigError(f"{name}: the list of URLs is empty")
    for index, url in enumerate(urls):
        if url in urls[:index]:
            raise PDConfigError(f"{name}: {url!r} is given twice")
    return tuple(urls)


def _file(value: object, name: str) -> str:
    path = _path(value, name)
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        raise PDConfigError(f"{name}: {path} is no file that can be read")
    return path


def _seconds(minimum_s: float) -> Callable[[object, str], float]:
    return lambda value, name: parse_duration(value, name, minimum_s)


PREFILL, DECODE = PDRole.PREFILL, PDRole.DECODE
OPTIONS: Final = (
    PDOption(
        "role",
        "role",
        "Which half this instance runs. Default: neither (aggregated serving).",
        _choice("prefill", "decode"),
        choices=("prefill", "decode"),
    ),
    PDOption(
        "prefill",
        "prefill_urls",
        "Decode: HTTP base URLs of the prefill instances, e.g. http://p1:8100; dns+http://name:port means "
        "every address of a name. Without it, requests bring their own handoff (a router asks the prefill "
        "side).",
        _urls,
        metavar="URL",
        kind="list",
        only=DECODE,
    ),
    PDOption(
        "listen",
        "listen",
        "Where the engine core listens for peers. Default: the --host address (loopback without a secret "
        "file), port chosen by the system.",
        config.parse_listen,
        metavar="HOST[:PORT]",
    ),
    PDOption(
        "secret-file",
        "secret_file",
        "File with the deployment's secret, the same on all instances, readable by its owner only. Default: "
        "a file of this user, and everything stays on loopback.",
        _path,
        metavar="PATH",
    ),
    PDOption(
        "load-failure",
        "load_failure",
        "Decode: what to do when remote KV cannot be had: ask a prefill instance again, compute it here, or "
        "fail the request (HTTP 503). Default: reprefill.",
        _choice(*config.LOAD_FAILURE_POLICIES),
        choices=config.LOAD_FAILURE_POLICIES,
        only=DECODE,
    ),
    PDOption(
        "require-remote-kv",
        "require_remote_kv",
        "Decode: make any prefill on this instance an error (HTTP 503). Default: off.",
        config.parse_flag,
        kind="switch",
        only=DECODE,
    ),
    PDOption(
        "lease",
        "lease_s",
        "Prefill: how long finished KV is kept for its reader, who can renew it. Seconds; default 30.",
        _seconds(1.0),
        metavar="TIME",
    ),
    PDOption(
        "deadline",
        "deadline_s",
        "How long a request may wait for remote KV, all attempts together. Seconds; default 60.",
        _seconds(0.1),
        metavar="TIME",
    ),
    PDOption(
        "start-timeout",
        "start_timeout_s",
        "Decode: how long to wait at start for the first prefill instance. Seconds; default 600.",
        _seconds(0.1),
        metavar="TIME",
        only=DECODE,
    ),
    PDOption(
        "host-transport",
        "host_transport",
        "How KV moves between CPU instances: map the peer's memory, or TCP. Default: auto (mapped on one machine).",
        _choice(*config.HOST_TRANSPORTS),
        choices=config.HOST_TRANSPORTS,
    ),
    PDOption(
        "verify",
        "verify",
        "Check moved KV by checksum. Default: off, the only mode in this release.",
        _one_of(("off",), config.VERIFY_MODES),
        choices=config.VERIFY_MODES,
    ),
    PDOption(
        "transfer",
        "transfer",
        "Move blocks as they lie (straight), or gather them into a staging buffer, move that and scatter it (staged). "
        "Default: auto, decided for each transfer by what a probe of its link measured. Prefill: any but straight "
        "offers staging; the decode side decides.",
        _choice(*config.TRANSFER_MODES),
        choices=config.TRANSFER_MODES,
    ),
    PDOption(
        "rank-table",
        "rank_table",
        "NPUs only: link by this rank table (the same file on both sides) and not by address. Default: none, the "
        "devices are read from the system. `vllm pd ranktable` makes and checks such files.",
        _file,
        metavar="PATH",
    ),
)
BY_WORD: Final = {option.word: option for option in OPTIONS}
VARIABLES: Final = tuple(option.variable for option in OPTIONS)
TOOL_VARIABLES: Final = (
    "VLLM_PD_CACHE",  # of the build, which may share a shell with the server
    "VLLM_PD_COPY_THREADS",  # native/pool.py
    "VLLM_PD_COPY_CPUS",
    "VLLM_PD_HOST_LIBRARY",  # native/library.py
    "VLLM_PD_NPU_BACKEND",  # npu/probing.py
    "VLLM_PD_NPU_EXTENSION",
    "VLLM_PD_NPU_KERNEL",
)


def add_pd_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the group to a parser. Every default is None, so that "not given" stays visible."""
    group = parser.add_argument_group(title=GROUP_TITLE, description=GROUP_DESCRIPTION)
    for option in OPTIONS:
        text = f"{option.help} [env: {option.variable}]".replace("%", "%%")
        if option.kind == "switch":
            group.add_argument(option.flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif option.kind == "list":
            group.add_argument(option.flag, nargs="+", action="extend", metavar=option.metavar, default=None, help=text)
        elif option.choices:
            group.add_argument(option.flag, choices=option.choices, default=None, help=text)
        else:
            group.add_argument(option.flag, metavar=option.metavar, default=None, help=text)


@dataclasses.dataclass(frozen=True)
class Given:
    """One option's validated value, and the name under which the user gave it."""

    name: str
    value: Any


def read_options(arguments: object, environ: Mapping[str, str] = os.environ) -> dict[str, Given]:
    """What was given, by option word, from `arguments.pd_*` (EngineArgs or Namespace) and the environment.

    Raises:
        PDConfigError: an unknown `VLLM_PD_…` variable, a bad value, or options that do not go together.
    """
    for variable in environ:
        if variable.startswith(ENV_PREFIX) and variable not in (*VARIABLES, *TOOL_VARIABLES):
            raise PDConfigError(f"{variable}: unknown environment variable{nearest(variable, VARIABLES)}")
    given: dict[str, Given] = {}
    for option in OPTIONS:
        value: object = getattr(arguments, option.attribute, None)
        name = option.flag
        if value is None and environ.get(option.variable):
            name, value = option.variable, environ[option.variable]
        if value is not None:
            given[option.word] = Given(name, option.parse(value, name))
    check_together(given)
    return given


def check_together(given: Mapping[str, Given]) -> None:
    """Refuse options that do not fit the role, and addresses that need a secret."""
    role = given.get("role")
    if role is None:
        for word, item in given.items():
            if item.value is False:
                continue
            roles = "decode" if BY_WORD[word].only is DECODE else "{prefill,decode}"
            raise PDConfigError(f"{item.name} {shown(item.value)} needs --pd-role {roles}, which is not given")
        return
    for word, item in given.items():
        only = BY_WORD[word].only
        if only is not None and only != role.value:
            raise PDConfigError(
                f"{item.name} {shown(item.value)} needs --pd-role {only.value}, but {role.name} is {role.value}"
            )
    listen = given.get("listen")
    if listen is not None:
        check_bind(listen.value[0], listen.name, given)


def check_bind(host: str, name: str, given: Mapping[str, Given]) -> None:
    """Without a secret file, nothing may listen beyond loopback."""
    if "secret-file" not in given and not is_loopback(host):
        raise PDConfigError(
            f"{name} {host} is reachable from other machines and there is no secret: give --pd-secret-file, "
            f"or listen on 127.0.0.1"
        )


def shown(value: object) -> str:
    """A parsed value, roughly as it was written."""
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value)
    return str(value)


def pd_environment() -> dict[str, Callable[[], str | None]]:
    """Our variables for upstream's table of known ones.

    The values are withheld: upstream hashes the table into its compile cache key, and none of ours changes
    what is compiled.
    """
    return dict.fromkeys(VARIABLES, lambda: None)
