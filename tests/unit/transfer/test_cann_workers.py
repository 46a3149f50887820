# SPDX-License-Identifier: Apache-2.0
"""Whole worker halves over the stand-in of CANN's package: registration, links, straight and staged pulls, restarts.

Not run on an NPU.
"""

from __future__ import annotations

import pytest

from tests.unit.transfer.cann_worker import CannSide

SRC, DST = [5, 6, 2, 19, 23], [1, 2, 20, 3, 21]
WAYS = {"9.1.0": "hixl", "8.5.0": "comm_res", "8.2.0": "two_sided"}


@pytest.fixture
def make_side(tmp_path):
    sides: list[CannSide] = []

    def make(role: str, release: str, transfer: str = "straight") -> CannSide:
        order = [0, 1, 2, 3] if role == "prefill" else [2, 0, 3, 1]
        folder = tmp_path / f"{role}{len(sides)}"
        sides.append(CannSide(folder, release, role=role, order=order, kind="mla", transfer=transfer))
        return sides[-1]

    yield make
    for side in sides:
        side.kill()


@pytest.mark.parametrize("transfer", ["straight", "staged"])
@pytest.mark.parametrize("release", WAYS)
def test_workers_hand_over_by_the_best_way_of_the_release(make_side, release, transfer):
    prefill, decode = make_side("prefill", release, transfer), make_side("decode", release, transfer)
    address = prefill.told["address"]
    assert (address["port"] == 0) is (WAYS[release] == "two_sided")
    assert all(18000 <= address[name] < 20000 for name in ("port", "link_port", "stage_port") if address[name])
    assert address["link_port"]
    assert address["device"]["physical_id"] == 1
    result = decode.call("pull", prefill.told, SRC, DST)
    assert result["ok"], result["reason"]
    assert result["staged"] is (transfer == "staged")
    assert decode.call("compare", SRC, DST) == []


@pytest.mark.parametrize("release", WAYS)
def test_workers_hand_over_after_either_was_killed_and_started_again(make_side, release):
    prefill, decode = make_side("prefill", release), make_side("decode", release)
    assert decode.call("pull", prefill.told, SRC, DST)["ok"]
    decode.kill()
    decode = make_side("decode", release)
    result = decode.call("pull", prefill.told, SRC, DST)
    assert result["ok"], result["reason"]
    prefill.kill()
    prefill = make_side("prefill", release)
    decode.call("fill")
    result = decode.call("pull", prefill.told, SRC, DST)
    assert result["ok"], result["reason"]
    assert decode.call("compare", SRC, DST) == []
