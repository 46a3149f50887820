# SPDX-License-Identifier: Apache-2.0
"""What code cannot say of itself: what a reason means and what to do, what a variable is for. A test checks that all
reasons are here and that none is here that does not exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Meaning:
    """One reason; `action` is empty where nothing need be done."""

    meaning: str
    action: str = ""


_FEATURE = "nothing: the decode instance serves it alone, correctly"

FALLBACKS: Final = {
    # the front door: before anything was asked
    "pooling": Meaning("an embedding or scoring request", _FEATURE),
    "prompt_embeds": Meaning("the prompt came as embeddings", _FEATURE),
    "multimodal": Meaning("the prompt has images or other media", _FEATURE),
    "lora": Meaning("the request names an adapter", _FEATURE),
    "n>1": Meaning("more than one answer was asked for", _FEATURE),
    "prompt_logprobs": Meaning("`prompt_logprobs`, or `echo` with `logprobs`", _FEATURE),
    "streaming_input": Meaning("the prompt comes in pieces", _FEATURE),
    "no_handoff": Meaning(
        "no `--pd-prefill`, and the request brought no handoff",
        "send requests through the router, or give `--pd-prefill`",
    ),
    "no_prefill_instance": Meaning(
        "no prefill instance is healthy", "`vllm pd status` of the decode instance: `api_server.pool` says why for each"
    ),
    "bad_handoff": Meaning(
        "the handoff in `kv_transfer_params` is missing, forged, or made for another prompt",
        "the log line says which; look at the router, and that all instances have the same secret",
    ),
    # while remote KV was being got
    "deadline": Meaning(
        "remote KV did not come within `--pd-deadline`", "add prefill capacity, or raise the deadline (see sizing)"
    ),
    "core_unreachable": Meaning(
        "our own engine core did not answer its API server", "`/health` and the log of this instance"
    ),
    "internal_error": Meaning("a defect of ours; the log has a traceback", "please report it"),
    # asks: no handoff was got from a prefill instance
    "ask_failed": Meaning("it answered HTTP 5xx other than 503", "the log of the prefill instance"),
    "ask_busy": Meaning(
        "it answered HTTP 429 or 503: no lease, or its engine core does not answer", "add prefill capacity"
    ),
    "ask_unauthorized": Meaning(
        "it answered HTTP 401 or 403: another secret, or it was restarted since it was probed",
        "the same `--pd-secret-file` everywhere; after a restart it heals at the next probe",
    ),
    "ask_not_prefill": Meaning("it has no `/pd/prefill`", "the URL in `--pd-prefill`: is it `--pd-role prefill`?"),
    "ask_rejected": Meaning("it answered HTTP 4xx: no instance would take this request", "the log line has its words"),
    "ask_bad_answer": Meaning(
        "it answered something that is no handoff of ours", "versions, and the secret, on both sides"
    ),
    "ask_timeout": Meaning("it accepted the request and did not answer in time", "its queue; raise `--pd-deadline`"),
    "ask_unreachable": Meaning("connection refused or lost", "is it running; address, firewall"),
    # loads: there was a handoff, and its KV could not be used
    "load_failed": Meaning("a reason without a word of its own; the log line has its text", "the log line"),
    "load_deadline": Meaning("too little time was left for the next slice", "raise `--pd-deadline` or `--pd-lease`"),
    "load_duplicate": Meaning("another request has used this handoff", "a router sent one handoff twice"),
    "load_handoff": Meaning(
        "a request without an API server of ours brought a bad handoff", "the log line has its words"
    ),
    "load_internal": Meaning("a defect of ours; the log has a traceback", "please report it"),
    "load_layout": Meaning(
        "the handoff is of an engine with other cache groups", "the same model and flags on both roles"
    ),
    "load_lease": Meaning(
        "the prefill engine core answered a lease question with a refusal", "the log line has its words"
    ),
    "load_lease_cancelled": Meaning("the lease had been cancelled", "nothing, when the client had gone"),
    "load_lease_expired": Meaning(
        "the lease ended before the last byte was read: the bytes are not used",
        "raise `--pd-lease` on the prefill side",
    ),
    "load_lease_released": Meaning("the lease had been released before", "a router sent one handoff twice"),
    "load_lease_unknown": Meaning(
        "the prefill engine does not know the lease: it was restarted, or another decode instance reads it",
        "nothing after a restart; else look at the router",
    ),
    "load_link": Meaning("no data link to a prefill rank", "firewall, addresses; see troubleshooting, links"),
    "load_peer": Meaning("the handshake with the engine of this handoff failed", "the log line names the field"),
    "load_plan": Meaning("the handoff's blocks do not cover the prompt, or its engine was replaced", "the log line"),
    "load_prompt": Meaning("the handoff was made for another prompt", "look at the router"),
    "load_pull": Meaning(
        "the data plane failed; the log line has its status code", "see troubleshooting, status codes"
    ),
    "load_signature": Meaning("the handoff is not signed with our secret", "the same `--pd-secret-file` everywhere"),
    "load_staging": Meaning(
        "the staged transfer failed, or the prefill side does not stage", "`--pd-transfer` on both sides"
    ),
    "load_unreachable": Meaning("the prefill engine core did not answer a lease question", "is it alive; firewall"),
}

# Variables that are not twins of flags.
VARIABLES: Final = {
    "VLLM_PD_CACHE": "Where builds and the demo model are cached; for the build only. Default "
    "`~/.cache/vllm-ascend-pd`.",
    "VLLM_PD_COPY_THREADS": "Copy threads of each engine process on CPU, 0 to 1024. Default: the CPUs that "
    "`VLLM_CPU_OMP_THREADS_BIND` leaves, at most 4; else 1.",
    "VLLM_PD_COPY_CPUS": "CPUs of these threads, like `0-3,8`; must lie within those of the process.",
    "VLLM_PD_HOST_LIBRARY": "Path of another `libpd_host.so` (sanitizers, a debugger).",
    "VLLM_PD_NPU_BACKEND": "Forces one backend of the NPU data path: `extension+kernel`, `extension+memcpy`, `triton`, "
    "`torch`. Default: the best that is found.",
    "VLLM_PD_NPU_EXTENSION": "Folder of `_pd_npu.so`. Default: inside the package.",
    "VLLM_PD_NPU_KERNEL": "Description of the kernel binaries (`pd_kv.json`); empty means none. Default: inside "
    "the package.",
    "VLLM_HOST_IP": "vLLM's. The address under which other hosts reach this one, where `--pd-listen` or `--host` is a "
    "wildcard. Default: the source address of the default route.",
    "VLLM_CPU_OMP_THREADS_BIND": "vLLM's. CPUs of the engine's own threads; copy threads take what it leaves. "
    "`vllm pd up` "
    "sets it for each instance.",
    "VLLM_USE_RUST_FRONTEND": "vLLM's. Anything but `0` is refused with `--pd-role`: that front end bypasses the "
    "front door.",
    "XDG_STATE_HOME": "Where the per-user secret and the logs of `vllm pd up` are kept. Default `~/.local/state`.",
    "PYTHONHASHSEED": "Told in the handshake, not compared.",
    "PD_COPY_KERNEL": "Forces a copy kernel of the host library; for benches and tests.",
    "PD_COPY_NONTEMPORAL_BYTES": "From which size copies bypass the cache; for benches and tests.",
    "HCCL_CONNECT_TIMEOUT": "CANN's. Seconds that a two-sided link may take (default 120); our host implementation "
    "reads it as CANN does.",
    "ASCEND_HOME_PATH": "CANN's, set by its `set_env.sh`: where CANN is. Its version is read there.",
    "ASCEND_TOOLKIT_HOME": "The same, by its older name.",
    "VLLM_VERSION": "vllm-ascend's. It believes this instead of vLLM's version, so another value is refused at start.",
    "KUBERNETES_SERVICE_HOST": "Set by Kubernetes; `vllm pd doctor` asks whether it runs in a pod.",
    "CXX": "The C++ compiler with which the NPU extension is built on an Ascend host.",
    "HCCL_NPU_SOCKET_PORT_RANGE": "CANN's. `auto` breaks links and is refused at start.",
    "ASCEND_RT_VISIBLE_DEVICES": "CANN's. Which NPUs a process sees; divides a host among instances.",
}
