# SPDX-License-Identifier: Apache-2.0
"""Parsers of the tools' output: whatever is printed, there is a value or an error with the line."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.ascend.replay import RECORDINGS, read_recording
from tests.unit.ascend.tables import SLOW
from vllm_ascend_pd.ascend.devices import CommandResult, DeviceError, UnknownOutputError
from vllm_ascend_pd.ascend.devices.hccn import parse_address, parse_conf, parse_state, parse_tls
from vllm_ascend_pd.ascend.devices.outputs import (
    ChipRow,
    parse_count,
    parse_health,
    parse_mapping,
    parse_remap,
    parse_super_pod,
)

PRINTED = sorted(
    {answer.text for path in RECORDINGS.glob("*.txt") for answer in read_recording(path.stem).answers.values()}
)


@st.composite
def damaged(draw):
    """A recorded output with a piece cut out, doubled, or replaced."""
    text = draw(st.sampled_from(PRINTED))
    first, last = sorted(draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=2)))
    return text[:first] + draw(st.text(max_size=20)) + text[draw(st.sampled_from((first, last))) :]


@settings(SLOW)
@given(text=damaged() | st.text(max_size=200), code=st.integers(0, 2))
def test_parsers_give_a_value_or_a_device_error(text, code):
    result = CommandResult(code, text)
    parsers = (
        lambda: parse_mapping(text, "m"),
        lambda: parse_count(text, "l"),
        lambda: parse_super_pod(result, "s"),
        lambda: parse_health(result, "h"),
        lambda: parse_remap(result),
        lambda: parse_address(result, "i"),
        lambda: parse_address(result, "v", "vnic ipaddr"),
        lambda: parse_tls(result, "t"),
        lambda: parse_state(result, "k", "link status"),
        lambda: parse_conf(text),
    )
    for parse in parsers:
        with contextlib.suppress(DeviceError):
            parse()


@settings(SLOW)
@given(text=damaged())
def test_a_damaged_table_never_gives_a_chip_that_was_not_printed(text):
    try:
        rows = parse_mapping(text, "m")
    except DeviceError:
        return
    words = text.split()
    for row in rows:
        assert str(row.card) in "".join(words)
        assert all(part in text for part in row.name.split())


def test_columns_are_found_by_name_also_with_single_blanks():
    text = "NPU ID Chip ID Chip Logic ID Chip Phy-ID Chip Name\n5 1 0 11 Ascend 910B3\n5 2 - - Mcu\n"
    assert parse_mapping(text, "m") == [ChipRow(card=5, chip=1, logic=0, physical=11, name="Ascend 910B3")]


def test_a_chip_without_logic_id_is_kept_apart():
    text = "NPU ID Chip ID Chip Logic ID Chip Name\n5 0 N/A 910B3\n"
    assert parse_mapping(text, "m") == [ChipRow(card=5, chip=0, logic=None, physical=None, name="910B3")]


def test_zero_is_a_super_device_id():
    place = parse_super_pod(CommandResult(0, "SDID : 0\nSuper Pod ID : 0\n"), "s")
    assert place is not None
    assert (place.super_device_id, place.super_pod_id) == ("0", "0")


@pytest.mark.parametrize("text", ["0.0.0.0", "::"])
def test_an_unspecified_address_is_none(text):
    assert parse_address(CommandResult(0, f"ipaddr:{text}\n"), "i") is None


def test_an_ipv6_address_is_read_whole():
    assert parse_address(CommandResult(0, "ipaddr:2001:db8::7\n"), "i") == "2001:db8::7"


def test_an_address_that_is_none_shows_its_line():
    with pytest.raises(UnknownOutputError, match=r"`i`: expected an IP address, found 'ipaddr:192.0.2.300'"):
        parse_address(CommandResult(0, "ipaddr:192.0.2.300\n"), "i")


def test_conf_lines_are_named_by_number():
    conf = parse_conf("address_0=192.0.2.1\naddress_0=192.0.2.2\n address_1 = 192.0.2.3 \naddress_2=\n")
    assert conf.addresses == {0: "192.0.2.1", 1: "192.0.2.3"}
    assert conf.problems == (
        "line 2: address_0 is given twice: 192.0.2.1 and 192.0.2.2",
        "line 4: address_2 is '', not an IP address",
    )
