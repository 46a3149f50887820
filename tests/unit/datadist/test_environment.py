# SPDX-License-Identifier: Apache-2.0
"""What of the data plane the handshake compares, what it only tells, and what is refused at start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_ascend_pd.datadist import describe_data_plane, environment, load
from vllm_ascend_pd.datadist.api import Way
from vllm_ascend_pd.errors import PDConfigError, PDError
from vllm_ascend_pd.handshake import UNKNOWN, Difference, compare

CANN = SimpleNamespace(name="cann", ways=(Way.HIXL, Way.COMM_RES, Way.TWO_SIDED))
FACTS = SimpleNamespace(cann="9.1.0", vllm_ascend="0.23.0.post1", chip="A2", driver="25.5", torch_npu=None)


def describe(environ=None, *, module=CANN, table="", facts=FACTS, tls="off"):
    return describe_data_plane(module, table, environ or {}, lambda: facts, lambda: tls)


def difference(one, other):
    found = compare({"data_plane": one[0]}, {"data_plane": other[0]})
    return [item for item in found if item.field.startswith("data_plane")]


def test_the_host_implementation_has_nothing_to_agree_about():
    assert describe({"HCCL_RDMA_TC": "7"}, module=load("host")) == ({"implementation": "host"}, {})


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [("HCCL_INTRA_ROCE_ENABLE", "1", "0"), ("HCCL_RDMA_TC", "100", "132"), ("HCCL_RDMA_SL", "1", "4")],
)
def test_variables_that_decide_how_bytes_travel_are_compared_with_their_defaults(name, value, taken):
    assert difference(describe(), describe({name: value})) == [Difference(f"data_plane.{name}", taken, value)]
    assert difference(describe(), describe({name: f" {taken}"})) == []


@pytest.mark.parametrize("name", environment.TOLD)
def test_other_variables_are_told(name):
    with_it = describe({name: "x"})
    assert difference(describe(), with_it) == []
    assert with_it[1][name] == "x"
    assert name not in describe()[1]


@pytest.mark.parametrize(
    ("field", "change", "values"),
    [
        ("implementation", {"module": load("host")}, ("cann", "host")),
        ("cann", {"facts": SimpleNamespace(**{**vars(FACTS), "cann": "9.0.0"})}, ("9.1.0", "9.0.0")),
        ("vllm_ascend", {"facts": SimpleNamespace(**{**vars(FACTS), "vllm_ascend": "0.24"})}, ("0.23.0.post1", "0.24")),
        ("tls", {"tls": "on"}, ("off", "on")),
        ("link_way", {"module": SimpleNamespace(name="cann", ways=(Way.COMM_RES,))}, ("hixl", "comm_res")),
    ],
)
def test_a_difference_is_named_with_both_values(field, change, values):
    assert Difference(f"data_plane.{field}", *values) in difference(describe(), describe(**change))


def test_what_cannot_be_read_is_not_compared():
    bare = SimpleNamespace(cann=None, vllm_ascend=None, chip=None, driver=None, torch_npu=None)
    assert difference(describe(), describe(facts=bare, tls=UNKNOWN)) == []


def test_rank_tables_are_compared_by_their_content(tmp_path):
    one, other = tmp_path / "a.json", tmp_path / "b.json"
    one.write_text("{}")
    other.write_text("{ }")
    assert [item.field for item in difference(describe(table=str(one)), describe(table=str(other)))] == [
        "data_plane.rank_table"
    ]
    assert describe(table=str(one))[0]["link_way"] == "two_sided"
    with pytest.raises(PDConfigError, match=r"--pd-rank-table: .*gone: No such file"):
        describe(table=str(tmp_path / "gone"))


def test_a_port_range_that_breaks_links_is_refused_at_start():
    with pytest.raises(PDConfigError, match="HCCL_NPU_SOCKET_PORT_RANGE is 'auto'"):
        describe({"HCCL_NPU_SOCKET_PORT_RANGE": "auto"})
    describe({"HCCL_NPU_SOCKET_PORT_RANGE": "50000-50100"})


@pytest.mark.parametrize(
    ("states", "answer"), [([True, True], "on"), ([False, None], "off"), ([None], UNKNOWN), ([], UNKNOWN)]
)
def test_the_tls_switch_is_that_of_the_devices(monkeypatch, states, answer):
    monkeypatch.setattr(environment, "inventory", lambda: None)
    monkeypatch.setattr(environment, "tls_switch", lambda _: [SimpleNamespace(on=on) for on in states])
    assert environment.read_tls() == answer


def test_unlike_tls_switches_on_one_host_are_refused(monkeypatch):
    monkeypatch.setattr(environment, "inventory", lambda: None)
    monkeypatch.setattr(environment, "tls_switch", lambda _: [SimpleNamespace(on=True), SimpleNamespace(on=False)])
    with pytest.raises(PDConfigError, match="TLS is on for some"):
        environment.read_tls()


def test_tools_that_are_missing_leave_the_tls_switch_unknown(monkeypatch):
    def missing():
        raise PDError("no npu-smi")

    monkeypatch.setattr(environment, "inventory", missing)
    assert environment.read_tls() == UNKNOWN
