# SPDX-License-Identifier: Apache-2.0
"""Pure: what each status code of `llm_datadist` means to a pull and to a link. Codes are matched by name: releases
differ in what kind of enumeration they are.

A link carries one transfer at a time, a transfer cannot be cancelled, and after a timeout nobody knows how far it
got: the link is unusable, and the blocks that it was writing stay out of use until the link has been taken down.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final


class Action(Enum):
    """What the caller does next."""

    DONE = "done"
    WAIT = "wait"  # the same again a little later, until the deadline
    RELINK = "relink"  # take the link down, make it anew, and try once more: no byte was moved
    FAIL = "fail"  # this transfer fails; the request's policy decides what follows


@dataclass(frozen=True)
class Outcome:
    """`spoils`: the link is of no use to anybody any more and must be taken down before any of its blocks is reused."""

    action: Action
    spoils: bool = False


DONE: Final = Outcome(Action.DONE)
WAIT: Final = Outcome(Action.WAIT)
RELINK: Final = Outcome(Action.RELINK, spoils=True)
FAIL: Final = Outcome(Action.FAIL)
FAIL_AND_DROP: Final = Outcome(Action.FAIL, spoils=True)

# A pull over a link that was made.
PULL: Final[dict[str, Outcome]] = {
    "LLM_SUCCESS": DONE,
    "LLM_FAILED": FAIL_AND_DROP,
    "LLM_WAIT_PROCESS_TIMEOUT": FAIL_AND_DROP,
    "LLM_KV_CACHE_NOT_EXIST": RELINK,  # a link keeps the peer's table of its first transfer
    "LLM_REPEAT_REQUEST": WAIT,
    "LLM_REQUEST_ALREADY_COMPLETED": FAIL_AND_DROP,
    "LLM_PARAM_INVALID": FAIL,  # refused before anything was moved
    "LLM_ENGINE_FINALIZED": FAIL,
    "LLM_NOT_YET_LINK": RELINK,
    "LLM_ALREADY_LINK": FAIL_AND_DROP,
    "LLM_LINK_FAILED": RELINK,
    "LLM_UNLINK_FAILED": FAIL_AND_DROP,
    "LLM_NOTIFY_PROMPT_UNLINK_FAILED": FAIL_AND_DROP,
    "LLM_CLUSTER_NUM_EXCEED_LIMIT": WAIT,
    "LLM_PROCESSING_LINK": WAIT,
    "LLM_DEVICE_OUT_OF_MEMORY": WAIT,
    "LLM_PREFIX_ALREADY_EXIST": FAIL,
    "LLM_PREFIX_NOT_EXIST": FAIL,
    "LLM_SEQ_LENOVERLIMIT": FAIL,
    "LLM_NO_FREE_BLOCK": WAIT,
    "LLM_BLOCKS_OUT_OF_MEMORY": WAIT,
    "LLM_EXIST_LINK": FAIL,
    "LLM_FEATURE_NOT_ENABLED": FAIL,
    "LLM_TIMEOUT": FAIL_AND_DROP,
    "LLM_LINK_BUSY": WAIT,
    "LLM_OUT_OF_MEMORY": WAIT,
    "LLM_DEVICE_MEM_ERROR": FAIL_AND_DROP,
    "LLM_SUSPECT_REMOTE_ERROR": FAIL_AND_DROP,
    "LLM_UNKNOWN_ERROR": FAIL_AND_DROP,
}

# Making a link. Where it says FAIL_AND_DROP, something of it may be there: it is taken down again.
LINK: Final[dict[str, Outcome]] = {
    **PULL,
    "LLM_KV_CACHE_NOT_EXIST": FAIL_AND_DROP,
    "LLM_REPEAT_REQUEST": WAIT,
    "LLM_PARAM_INVALID": FAIL_AND_DROP,  # also what peers of unlike modes get
    "LLM_NOT_YET_LINK": FAIL_AND_DROP,
    "LLM_ALREADY_LINK": RELINK,  # nobody here knows of it: it was left by a failure
    "LLM_LINK_FAILED": FAIL_AND_DROP,
    "LLM_EXIST_LINK": RELINK,
}


def judge(table: dict[str, Outcome], code: Any) -> Outcome:
    """What `code` (a member of any release's `LLMStatusCode`) means; what is not known is as LLM_FAILED."""
    return table.get(getattr(code, "name", str(code)), FAIL_AND_DROP)
