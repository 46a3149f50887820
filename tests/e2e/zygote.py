# SPDX-License-Identifier: Apache-2.0
"""The zygote: one process imports vLLM once and forks engines from itself; two engines answer in 5 s instead of 60.

`python -m tests.e2e.zygote FD`: reads one JSON object per line from the socket FD ({"op": "fork", "spec": {...}} or
{"op": "reap"}), answers one per line. No torch operation and no thread before a fork. A forked engine talks over a
socket of its own (`engine_child.py`). Nothing on these sockets is executable.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import traceback
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def import_everything() -> None:
    """What the engines will need, so that no child pays for it.

    Registering the classes (instead of their names) spares each engine the subprocess in which upstream inspects a
    model that it has not seen on this machine: 20 s and a vLLM import per architecture.
    """
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM
    from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    from vllm import LLM, ModelRegistry, SamplingParams  # noqa: F401

    valid_vec_isa_list()  # torch asks a process of its own for each instruction set, seconds in every engine
    for model in (DeepseekV2ForCausalLM, Gemma3ForCausalLM, LlamaForCausalLM, Qwen2ForCausalLM):
        ModelRegistry.register_model(model.__name__, model)


def reap() -> dict[str, int]:
    """Exit codes of children that have ended, by pid; negative for a signal."""
    ended = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[str(pid)] = os.waitstatus_to_exitcode(status)


def fork_engine(spec: dict[str, Any], control: socket.socket) -> int:
    """A new process that becomes one engine; returns its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        control.close()
        log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        from tests.e2e.engine_child import run_engine

        code = run_engine(spec)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(descriptor: int) -> None:
    """Serve until the other end of the socket closes."""
    os.environ.update(ENVIRONMENT)
    control = socket.socket(fileno=descriptor)
    import_everything()
    gc.freeze()  # children copy fewer pages
    stream = control.makefile("rw", encoding="utf-8", newline="\n")

    def answer(message: dict[str, Any]) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    answer({"ready": os.getpid()})
    for line in stream:
        message = json.loads(line)
        if message["op"] == "fork":
            answer({"pid": fork_engine(message["spec"], control)})
        else:
            answer({"ended": reap()})


if __name__ == "__main__":
    main(int(sys.argv[1]))
