# SPDX-License-Identifier: Apache-2.0
"""Every status code has one meaning for a pull and one for a link."""

from __future__ import annotations

from enum import Enum

import pytest

from vllm_ascend_pd.datadist.outcomes import FAIL_AND_DROP, LINK, PULL, Action, judge
from vllm_ascend_pd.datadist.status import LLMStatusCode

UNDEFINED = ("LLM_TIMEOUT", "LLM_WAIT_PROCESS_TIMEOUT", "LLM_FAILED", "LLM_UNKNOWN_ERROR", "LLM_DEVICE_MEM_ERROR")


@pytest.mark.parametrize("table", [PULL, LINK])
def test_every_code_is_in_the_tables_and_nothing_else(table):
    assert set(table) == {code.name for code in LLMStatusCode}


@pytest.mark.parametrize("code", UNDEFINED)
def test_a_transfer_that_may_still_be_running_is_never_tried_again_over_its_link(code):
    assert PULL[code].spoils
    assert PULL[code].action is Action.FAIL


def test_waiting_leaves_the_link_and_relinking_does_not():
    for table in (PULL, LINK):
        for outcome in table.values():
            assert outcome.spoils is not (outcome.action in (Action.WAIT, Action.DONE)) or outcome.action is Action.FAIL
            assert outcome.action is not Action.RELINK or outcome.spoils
    assert [code for code, outcome in PULL.items() if outcome.action is Action.DONE] == ["LLM_SUCCESS"]
    assert [code for code, outcome in LINK.items() if outcome.action is Action.DONE] == ["LLM_SUCCESS"]


def test_a_link_that_nobody_knows_of_is_made_anew():
    assert LINK["LLM_ALREADY_LINK"].action is Action.RELINK
    assert PULL["LLM_NOT_YET_LINK"].action is Action.RELINK


def test_codes_of_every_kind_of_enumeration_are_judged_by_name():
    class Plain(Enum):
        LLM_LINK_BUSY = 1
        LLM_OF_A_LATER_RELEASE = 2

    assert judge(PULL, Plain.LLM_LINK_BUSY).action is Action.WAIT
    assert judge(PULL, LLMStatusCode.LLM_SUCCESS).action is Action.DONE
    assert judge(PULL, Plain.LLM_OF_A_LATER_RELEASE) is FAIL_AND_DROP
