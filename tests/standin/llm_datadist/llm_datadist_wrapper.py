# SPDX-License-Identifier: Apache-2.0
"""The extension module's constants (datadist-api.md §9); its functions are not in the stand-in."""

from __future__ import annotations

from llm_datadist.status import LLMStatusCode as _codes

_NAMES = {
    "kSuccess": "LLM_SUCCESS",
    "kFailed": "LLM_FAILED",
    "kParamInvalid": "LLM_PARAM_INVALID",
    "kLLMKVCacheNotExist": "LLM_KV_CACHE_NOT_EXIST",
    "kLLMNotYetLink": "LLM_NOT_YET_LINK",
    "kAlreadyLink": "LLM_ALREADY_LINK",
    "kLinKFailed": "LLM_LINK_FAILED",
    "kUnlinkFailed": "LLM_UNLINK_FAILED",
    "kLLMExistLink": "LLM_EXIST_LINK",
    "kLLMFeatureNotEnabled": "LLM_FEATURE_NOT_ENABLED",
    "kLLMTimeout": "LLM_TIMEOUT",
    "kLLMLinkBusy": "LLM_LINK_BUSY",
    "kLLMOutOfMemory": "LLM_OUT_OF_MEMORY",
    "kLLMDeviceMemError": "LLM_DEVICE_MEM_ERROR",
    "kLLMSuspectRemoteError": "LLM_SUSPECT_REMOTE_ERROR",
}
globals().update({name: _codes[code].value for name, code in _NAMES.items()})
