# SPDX-License-Identifier: Apache-2.0
"""Reading: round trips of all formats, tolerance, and problems with their line for everything else."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.ascend.tables import SLOW, address, tables
from vllm_ascend_pd.ascend.ranktable import RankTableError, from_devices, read_table, scan_table, write_table
from vllm_ascend_pd.ascend.ranktable.check import check_text
from vllm_ascend_pd.ascend.ranktable.lines import MAX_CHARS, NotJson, parse

PAIR = write_table(from_devices([address(1, 0, a3=True), address(2, 0, a3=True, pod=1)]))


def plain(node):
    """A `lines.Node` as `json.loads` would give it."""
    if isinstance(node.value, dict):
        return {key: plain(member) for key, member in node.value.items()}
    return [plain(member) for member in node.value] if isinstance(node.value, list) else node.value


@settings(SLOW, max_examples=50)
@given(tables(), st.sampled_from((None, 2)))
def test_every_table_is_read_back_as_it_was_written(table, indent):
    scan = scan_table(write_table(table, indent=indent))
    assert scan.table == table


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(SLOW)
@given(JSON, st.sampled_from((None, 0, 3)), st.booleans())
def test_json_is_read_as_the_standard_library_reads_it(value, indent, ascii_only):
    assert plain(parse(json.dumps(value, indent=indent, ensure_ascii=ascii_only))) == value


@settings(SLOW)
@given(st.text(max_size=60))
def test_what_the_standard_library_refuses_is_refused(text):
    try:
        json.loads(text)
    except ValueError:
        with pytest.raises(NotJson):
            parse(text)


@st.composite
def damaged_tables(draw):
    """The text of a table with a piece cut out, doubled or replaced."""
    text = write_table(draw(tables()))
    first, last = sorted(draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=2)))
    middle = draw(st.sampled_from(("", text[first:last] * 2, "null", "[]", "{}", '"', "7", "\n", ",", "true")))
    return text[:first] + middle + text[last:]


@settings(SLOW, max_examples=80)
@given(damaged_tables() | JSON.map(json.dumps) | st.text(max_size=80))
def test_whatever_is_in_the_file_there_is_a_table_or_a_problem_with_its_line(text):
    scan = check_text(text)
    assert scan.table is not None or any(problem.level == "fail" for problem in scan.problems)
    lines = text.count("\n") + 1
    for problem in scan.problems:
        assert 1 <= problem.line <= lines
        assert problem.message
        assert problem.action
    failed = scan.table is None or any(problem.level == "fail" for problem in scan_table(text).problems)
    with pytest.raises(RankTableError, match="^line ") if failed else contextlib.nullcontext():
        read_table(text)


LISTS = ("server_list", "device", "super_pod_list", "server_group_list", "prefill_device_list", "decode_device_list")
FIELDS = ("version", "status", "server_count", "server_id", "device_id", "rank_id", "super_pod_id", "group_id")
NEAR = st.recursive(
    JSON | st.sampled_from(("0", "1.2", "10.0.0.1")),
    lambda inner: (
        st.dictionaries(st.sampled_from(LISTS), st.lists(inner, max_size=3) | inner, max_size=3)
        | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4)
    ),
    max_leaves=15,
)


@settings(SLOW, max_examples=60)
@given(st.fixed_dictionaries({"version": NEAR}, optional={name: st.lists(NEAR, max_size=3) | NEAR for name in LISTS}))
def test_known_names_with_unknown_values_never_end_in_a_traceback(value):
    scan = check_text(json.dumps(value))
    assert scan.table is not None or scan.problems


def test_a_table_of_a_thousand_devices_is_checked_quickly():
    devices = [address(number // 8, number % 8) for number in range(1000)]
    text = write_table(from_devices(devices))
    started = time.process_time()
    scan = check_text(text)
    assert time.process_time() - started < 3
    assert scan.problems == []
    assert scan.table is not None
    assert sum(1 for _ in scan.table.rows()) == 1000


def test_a_late_fault_in_a_large_table_has_its_line():
    devices = [address(number // 8, number % 8) for number in range(1000)]
    lines = write_table(from_devices(devices)).splitlines()
    at = max(number for number, line in enumerate(lines) if '"device_ip"' in line)
    lines[at] = lines[at].replace("192.0.", "192.0.2.")
    (problem,) = check_text("\n".join(lines)).problems
    assert problem.line == at + 1
    assert problem.field == "server_list[124].device[7].device_ip"


def change(text, old, new):
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "line", "field", "message"),
    [
        ("", 1, "", "expected a value, but the line ends"),
        ('{"version": "1.0",}', 1, "", r"expected a key in quotes, found '}'"),
        ('{\n"version": "1.0\n', 2, "", "a text that ends with a quote on the same line"),
        ('{\n"a": 1,\n"a": 2}', 3, "", "key 'a' is there twice"),
        ("[" * 40, 1, "", "nested deeper than 16"),
        ("[]", 1, "", "is a list"),
        ("{}", 1, "", "has no list of devices"),
        ('{"server_list": [], "prefill_device_list": []}', 1, "", "lists of 2 formats"),
        ('{"version": "1.0", "server_list": []}', 1, "server_list", "is empty"),
        ('{"version": "1.0", "prefill_device_list": [], "decode_device_list": []}', 1, "prefill_device", "both lists"),
        (change(PAIR, '"server_count": "2"', '"server_count": "3"'), 3, "server_count", "is 3, but there are 2"),
        (change(PAIR, '      "server_id": "198.51.100.1",\n', ""), 6, "server_list[0].server_id", "is missing"),
        (change(PAIR, '"device_id": "0"', '"device_id": true'), 10, "device_id", "is true or false"),
        (change(PAIR, '"device_id": "0"', '"device_id": 0.5'), 10, "device_id", "is a number"),
        (change(PAIR, '"device_id": "0"', f'"device_id": "{"9" * 300}"'), 10, "device_id", "has 300 characters"),
        (change(PAIR, '"super_pod_id": "1"', '"super_pod_id": "0"'), 39, "super_pod_list[1].super", "'0' is there tw"),
        (change(PAIR[::-1], '"2.001.15.891"', '"3.001.15.891"')[::-1], 42, "super_pod_list[1].server_list[0].server_id",
         "server '198.51.100.3' is not in server_list"),
        (change(PAIR[::-1], '"2.001.15.891"', '"1.001.15.891"')[::-1], 42, "super_pod_list[1].server_list[0].server_id",
         "is in the super pods '0' and '1'"),
    ],
)  # fmt: skip
def test_problems_have_line_field_and_message(text, line, field, message):
    failures = [problem for problem in scan_table(text).problems if problem.level == "fail"]
    assert any(
        problem.line == line and field in problem.field and message.replace("\\", "") in problem.message
        for problem in failures
    ), failures


def test_numbers_in_place_of_texts_are_read_and_said_once():
    text = PAIR.replace('"0"', "0").replace('"1"', "1")
    scan = scan_table(text)
    assert scan.table == read_table(PAIR)
    (problem,) = scan.problems
    assert (problem.level, problem.line) == ("warn", 10)
    assert problem.message.startswith("6 values are numbers")


def test_unknown_fields_are_kept_and_said_once_per_name():
    text = PAIR.replace('"rank_id"', '"colour": "red",\n "rank_id"').replace('"status"', '"statu": "x", "status"')
    scan = scan_table(text)
    assert [(problem.level, problem.field) for problem in scan.problems] == [("warn", "statu"), ("warn", "colour")]
    assert "(2 times)" in scan.problems[1].message
    assert scan.table is not None
    assert write_table(scan.table).count('"colour": "red"') == 2


def test_a_misspelt_field_is_recognised():
    (problem, *_) = scan_table(PAIR.replace('"super_device_id"', '"super_devce_id"')).problems
    assert "did you mean 'super_device_id'?" in problem.message


def test_a_file_that_is_too_large_is_not_read():
    with pytest.raises(NotJson, match="at most"):
        parse(" " * (MAX_CHARS + 1))


def test_reading_stops_with_the_first_failure():
    with pytest.raises(RankTableError, match=r"^line 3, server_count: is 3, but there are 2 servers; write \"2\""):
        read_table(PAIR.replace('"server_count": "2"', '"server_count": "3"'))


def test_roles_keep_the_order_of_interleaved_servers():
    entries = [{"server_id": name, "device_id": str(number)} for number, name in enumerate("abab")]
    text = json.dumps({"version": "1.2", "prefill_device_list": entries, "decode_device_list": []})
    table = read_table(text)
    assert [server.server_id for _, server, _ in table.rows()] == list("abab")
    assert json.loads(write_table(table))["server_count"] == "2"
