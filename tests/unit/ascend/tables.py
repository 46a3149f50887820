# SPDX-License-Identifier: Apache-2.0
"""Devices and tables for the rank-table tests, and Hypothesis strategies for them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from vllm_ascend_pd.ascend.ranktable.model import RankTable, TableDevice, TableGroup, TableServer
from vllm_ascend_pd.wire import DeviceAddress

# A machine with much else to do must not decide about a test.
SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def address(server: int, physical: int, *, a3: bool = False, pod: int = 0) -> DeviceAddress:
    """NPU `physical` of the host 198.51.100.`server`."""
    return DeviceAddress(
        server_id=f"198.51.100.{server}",
        logical_id=physical,
        physical_id=physical,
        device_ip=f"192.0.{server}.{physical + 1}",
        super_device_id=str(server * 256 + physical) if a3 else "",
        super_pod_id=str(pod) if a3 else "",
    )


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
NAME = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
NUMBER = st.integers(0, 1 << 31).map(str)
MAYBE = st.just("") | NUMBER


@st.composite
def addresses(draw: st.DrawFn, a3: bool) -> list[DeviceAddress]:
    """Different devices of some servers; a server is in one super pod."""
    places = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 15)), min_size=1, max_size=24, unique=True))
    return [address(server, physical, a3=a3, pod=server % 3) for server, physical in places]


@st.composite
def _device(draw: st.DrawFn, pod: str) -> TableDevice:
    extras = draw(st.dictionaries(NAME.map(lambda name: "x_" + name), TEXT, max_size=2))
    return TableDevice(
        device_id=draw(NUMBER),
        device_ip=draw(TEXT),
        rank_id=draw(MAYBE),
        cluster_id=draw(MAYBE),
        super_device_id=draw(MAYBE),
        super_pod_id=pod,
        device_port=draw(MAYBE),
        host_port=draw(MAYBE),
        backup_device_ip=draw(TEXT),
        backup_device_port=draw(MAYBE),
        device_logical_id=draw(MAYBE),
        extras=tuple(extras.items()),
    )


@st.composite
def _servers(draw: st.DrawFn, roles: bool, empty: bool) -> tuple[TableServer, ...]:
    names = draw(st.lists(NAME, min_size=0 if empty or roles else 1, max_size=4, unique=True))
    servers = []
    for name in names:
        pod = draw(MAYBE)
        devices = draw(st.lists(_device(pod), min_size=0 if empty else 1, max_size=4))
        more = {} if roles else {"host_ip": draw(TEXT), "server_ip": draw(TEXT), "extras": (("y", draw(TEXT)),)}
        servers.append(TableServer(server_id=name, devices=tuple(devices), **more))
    return tuple(servers)


@st.composite
def tables(draw: st.DrawFn) -> RankTable:
    """Any table that can be written, in any of the three formats; most are wrong in what they say."""
    kind = draw(st.sampled_from(("pair", "roles", "groups")))
    if kind == "pair":
        groups = (TableGroup("", draw(_servers(False, False))),)
    elif kind == "roles":
        groups = tuple(TableGroup(role, draw(_servers(True, False))) for role in ("prefill", "decode"))
    else:
        ids = draw(st.lists(NAME, min_size=1, max_size=3, unique=True))
        groups = tuple(TableGroup(name, draw(_servers(False, True))) for name in ids)
    extras = draw(st.dictionaries(NAME.map(lambda name: "z_" + name), TEXT, max_size=2))
    return RankTable(
        format=kind,
        version=draw(st.sampled_from(("1.0", "1.2", "2.0"))),
        groups=groups,
        status=draw(NAME),
        extras=tuple(extras.items()),
    )
