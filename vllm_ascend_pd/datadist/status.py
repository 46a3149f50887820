# SPDX-License-Identifier: Apache-2.0
"""Status codes and the exception of `llm_datadist` (datadist-api.md §3.1), with its checks (§0).

Values are the interface's. Shared by our host implementation and by the code that talks to CANN's.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NoReturn


class LLMStatusCode(IntEnum):
    """How a call ended."""

    LLM_SUCCESS = 0
    LLM_FAILED = 0xFFFFFFFF
    LLM_WAIT_PROCESS_TIMEOUT = 0x5010B001
    LLM_KV_CACHE_NOT_EXIST = 0x5010B002
    LLM_REPEAT_REQUEST = 0x5010B003
    LLM_REQUEST_ALREADY_COMPLETED = 0x5010B004
    LLM_PARAM_INVALID = 0x5010B005
    LLM_ENGINE_FINALIZED = 0x5010B006
    LLM_NOT_YET_LINK = 0x5010B007
    LLM_ALREADY_LINK = 0x5010B008
    LLM_LINK_FAILED = 0x5010B009
    LLM_UNLINK_FAILED = 0x5010B00A
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = 0x5010B00B
    LLM_CLUSTER_NUM_EXCEED_LIMIT = 0x5010B00C
    LLM_PROCESSING_LINK = 0x5010B00D
    LLM_DEVICE_OUT_OF_MEMORY = 0x5010B00E
    LLM_PREFIX_ALREADY_EXIST = 0x5010B00F
    LLM_PREFIX_NOT_EXIST = 0x5010B010
    LLM_SEQ_LENOVERLIMIT = 0x5010B011
    LLM_NO_FREE_BLOCK = 0x5010B012
    LLM_BLOCKS_OUT_OF_MEMORY = 0x5010B013
    LLM_EXIST_LINK = 0x5010B018
    LLM_FEATURE_NOT_ENABLED = 0x5010B019
    LLM_TIMEOUT = 0x5010B01A
    LLM_LINK_BUSY = 0x5010B01B
    LLM_OUT_OF_MEMORY = 0x5010B01C
    LLM_DEVICE_MEM_ERROR = 507053
    LLM_SUSPECT_REMOTE_ERROR = 507057
    LLM_UNKNOWN_ERROR = -1

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class LLMException(RuntimeError):
    """What a call that cannot return a status raises; `status_code` says which kind it is."""

    def __init__(self, *args: Any, status_code: LLMStatusCode = LLMStatusCode.LLM_SUCCESS) -> None:
        super().__init__(*args)
        self._status_code = status_code

    @property
    def status_code(self) -> LLMStatusCode:
        """The kind."""
        return self._status_code


class Status:
    """A status as an object; legacy."""

    def __init__(self, code: LLMStatusCode) -> None:
        self._code = code

    @property
    def status_code(self) -> LLMStatusCode:
        """The code."""
        return self._code

    def is_ok(self) -> bool:
        """Whether it is success."""
        return self._code == LLMStatusCode.LLM_SUCCESS


def to_status(value: int) -> LLMStatusCode:
    """The member of that value; LLM_FAILED for values that are none."""
    try:
        return LLMStatusCode(value)
    except ValueError:
        return LLMStatusCode.LLM_FAILED


def fail(status_code: LLMStatusCode, text: str) -> NoReturn:
    """Raise LLMException with the code in its text too."""
    raise LLMException(f"{text} ({status_code})", status_code=status_code)


def require(condition: bool, text: str) -> None:
    """Raise LLMException(LLM_PARAM_INVALID) unless `condition`."""
    if not condition:
        fail(LLMStatusCode.LLM_PARAM_INVALID, text)


def check_type(
    name: str,
    value: object,
    classes: type | tuple[type, ...],
    inner: type | tuple[type, ...] | None = None,
    *,
    allow_none: bool = True,
) -> None:
    """Raise TypeError unless `value` (and, with `inner`, each of its elements) has one of the classes.

    None passes unless `allow_none` is false, as in the interface.
    """
    if value is None and allow_none:
        return
    allowed = classes if isinstance(classes, tuple) else (classes,)
    if not isinstance(value, allowed):
        raise TypeError(f"{name} only support {[cls.__name__ for cls in allowed]}, but got {type(value)}.")
    if inner is not None and isinstance(value, Iterable):
        inner_allowed = inner if isinstance(inner, tuple) else (inner,)
        for element in value:
            if not isinstance(element, inner_allowed):
                names = [cls.__name__ for cls in inner_allowed]
                raise TypeError(f"{name} inner type only support {names}, but got {type(element)}.")


def check_integer(name: str, value: object, low: int, high: int, kind: str) -> None:
    """Raise TypeError for a non-integer (also None), ValueError outside `low`..`high`."""
    check_type(name, value, int, allow_none=False)
    if not low <= int(value) <= high:  # type: ignore[call-overload]
        raise ValueError(f"{name}'s value is out of range,{value} is not a {kind} value.")


def check_uint16(name: str, value: object) -> None:
    """0 .. 2**16-1."""
    check_integer(name, value, 0, 2**16 - 1, "uint16")


def check_uint32(name: str, value: object) -> None:
    """0 .. 2**32-1."""
    check_integer(name, value, 0, 2**32 - 1, "uint32")


def check_uint64(name: str, value: object) -> None:
    """0 .. 2**64-1."""
    check_integer(name, value, 0, 2**64 - 1, "uint64")


def check_int32(name: str, value: object) -> None:
    """-2**31 .. 2**31-1."""
    check_integer(name, value, -(2**31), 2**31 - 1, "int32")


def check_int64(name: str, value: object) -> None:
    """-2**63 .. 2**63-1."""
    check_integer(name, value, -(2**63), 2**63 - 1, "int64")
