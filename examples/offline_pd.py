# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode offline: two processes, each with vLLM's `LLM` class, two-phase by hand.

    python examples/offline_pd.py [--model PATH]

`LLM` has no asynchronous client, so nothing asks the prefill side by itself: the first leg's answer
(`RequestOutput.kv_transfer_params`) is given to the second leg in `SamplingParams.extra_args`. Without --model the
demo model is used, if it is in the cache (`make serve`, or `python -m tools.demo_model`, puts it there).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PROMPTS = ["What is the largest animal in the world?", "Q: What is the capital of France?\nA:"]


def run_engine(role: str | None, model: str, core: int, pipe: Connection) -> None:
    """Answer (prompts, max_tokens, params per prompt) with ((text, params) each, tokens loaded so far)."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(core))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # this process is the engine's already
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        enforce_eager=True,
        max_model_len=1024,
        block_size=32,
        kv_cache_memory_bytes=256 << 20,
        gpu_memory_utilization=0.3,
        distributed_executor_backend="uni",
        disable_log_stats=False,  # for the metric
        **({"pd_role": role} if role else {}),
    )
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        prompts, max_tokens, params = message
        sampling = [
            SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=one and {"kv_transfer_params": one})
            for one in params
        ]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        loaded = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:pd_loaded_tokens")
        pipe.send(([(output.outputs[0].text, output.kv_transfer_params) for output in outputs], int(loaded)))
    # In order, with or without an engine core process: multiprocessing would wait for one that nobody told to end.
    llm.llm_engine.engine_core.shutdown()


class Engine:
    """One engine process."""

    def __init__(self, role: str | None, model: str, core: int) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=run_engine, args=(role, model, core, theirs))
        self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Until it takes prompts."""
        self._receive()

    def generate(self, prompts: list[str], max_tokens: int, params: list[Any]) -> tuple[list[Any], int]:
        """Run all prompts."""
        self._pipe.send((prompts, max_tokens, params))
        answers, loaded = self._receive()
        return answers, loaded

    def close(self) -> None:
        """Let it end by itself."""
        if self._process.is_alive():
            self._pipe.send(None)
        self._process.join(60)
        self._process.kill()

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            sys.exit("an engine has ended, see its message above")


def find_model(argument: str | None) -> str:
    """The model folder that was asked for, or the demo model in the cache."""
    if argument:
        return argument
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tools.demo_model import get_model_dir, is_intact

    folder = get_model_dir()
    if not is_intact(folder):
        sys.exit(f"{folder} is not there: run `python -m tools.demo_model` once, or give --model PATH")
    return str(folder)


def main() -> None:
    """Both legs of two prompts."""
    parser = argparse.ArgumentParser(description="Prefill and decode offline, two-phase by hand.")
    parser.add_argument("--model", help="model folder or name; default: the demo model's cache")
    parser.add_argument("--max-tokens", type=int, default=24)
    arguments = parser.parse_args()
    model = find_model(arguments.model)
    multiprocessing.set_start_method("spawn")
    num_cores = os.cpu_count() or 1
    prefill, decode = Engine("prefill", model, num_cores - 1), Engine("decode", model, 0)
    try:
        prefill.wait()
        decode.wait()
        first_legs, _ = prefill.generate(PROMPTS, 1, [{"do_remote_decode": True}] * len(PROMPTS))
        handoffs = [params for _, params in first_legs]
        second_legs, loaded = decode.generate(PROMPTS, arguments.max_tokens, handoffs)
        for prompt, (text, _) in zip(PROMPTS, second_legs, strict=True):
            print(f"{prompt!r}\n  -> {text!r}")
        num_prompts = len(PROMPTS)
        print(f"{loaded} prompt tokens came from the prefill engine; the last one of each of {num_prompts} is computed")
    finally:
        prefill.close()
        decode.close()


if __name__ == "__main__":
    main()
