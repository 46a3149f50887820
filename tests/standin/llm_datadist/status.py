# SPDX-License-Identifier: Apache-2.0
"""Status codes and the exception (datadist-api.md §3.1)."""

from __future__ import annotations

from llm_datadist._release import BaseEnum
from llm_datadist.utils import log

_FIRST = 0x5010B000
_NUMBERED = {
    "LLM_WAIT_PROCESS_TIMEOUT": 0x01,
    "LLM_KV_CACHE_NOT_EXIST": 0x02,
    "LLM_REPEAT_REQUEST": 0x03,
    "LLM_REQUEST_ALREADY_COMPLETED": 0x04,
    "LLM_PARAM_INVALID": 0x05,
    "LLM_ENGINE_FINALIZED": 0x06,
    "LLM_NOT_YET_LINK": 0x07,
    "LLM_ALREADY_LINK": 0x08,
    "LLM_LINK_FAILED": 0x09,
    "LLM_UNLINK_FAILED": 0x0A,
    "LLM_NOTIFY_PROMPT_UNLINK_FAILED": 0x0B,
    "LLM_CLUSTER_NUM_EXCEED_LIMIT": 0x0C,
    "LLM_PROCESSING_LINK": 0x0D,
    "LLM_DEVICE_OUT_OF_MEMORY": 0x0E,
    "LLM_PREFIX_ALREADY_EXIST": 0x0F,
    "LLM_PREFIX_NOT_EXIST": 0x10,
    "LLM_SEQ_LENOVERLIMIT": 0x11,
    "LLM_NO_FREE_BLOCK": 0x12,
    "LLM_BLOCKS_OUT_OF_MEMORY": 0x13,
    "LLM_EXIST_LINK": 0x18,
    "LLM_FEATURE_NOT_ENABLED": 0x19,
    "LLM_TIMEOUT": 0x1A,
    "LLM_LINK_BUSY": 0x1B,
    "LLM_OUT_OF_MEMORY": 0x1C,
}
_MEMBERS = {
    "LLM_SUCCESS": 0,
    "LLM_FAILED": 0xFFFFFFFF,
    **{name: _FIRST + number for name, number in _NUMBERED.items()},
    "LLM_DEVICE_MEM_ERROR": 507053,
    "LLM_SUSPECT_REMOTE_ERROR": 507057,
    "LLM_UNKNOWN_ERROR": -1,
}
LLMStatusCode = BaseEnum("LLMStatusCode", _MEMBERS, module=__name__)


class LLMException(RuntimeError):
    """Carries a status."""

    def __init__(self, *args, status_code=LLMStatusCode.LLM_SUCCESS):
        super().__init__(*args)
        self._status_code = status_code

    @property
    def status_code(self):
        return self._status_code


class Status:
    """Legacy."""

    def __init__(self, code):
        self._code = code

    @property
    def status_code(self):
        return self._code

    def is_ok(self):
        return self._code == LLMStatusCode.LLM_SUCCESS


def code_2_status(code):
    """The member of a number; what is unknown has failed."""
    try:
        return LLMStatusCode(int(code))
    except ValueError:
        return LLMStatusCode.LLM_FAILED


def handle_llm_status(code, function_name, info=""):
    """Raise unless the engine's number means success."""
    status = code_2_status(code)
    if status != LLMStatusCode.LLM_SUCCESS:
        raise LLMException(f"[{function_name}] failed, error code is {status}, {info}.", status_code=status)


def raise_if_false(condition, text, *args):
    if not condition:
        text = text.format(*args) if args else text
        log.error(text)
        raise LLMException(text, status_code=LLMStatusCode.LLM_PARAM_INVALID)


def raise_if_true(condition, text, *args):
    raise_if_false(not condition, text, *args)
