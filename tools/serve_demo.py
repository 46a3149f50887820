# SPDX-License-Identifier: Apache-2.0
"""`make serve`: a real model answers through prefill/decode disaggregation on this machine, and proves it.

Starts what `vllm pd up` starts, and one aggregated server with the same settings beside it; asks both the same
prompts; prints the answers, what came from the prefill instance, how long each stage took, and whether the tokens
are the same. Then it keeps serving (ONCE=1: it ends). The exit code is 1 when the tokens differ or did not travel.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tools.cache import CacheError
from tools.demo_model import NAME, ensure_demo_model
from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.signals import sigterm_as_interrupt
from vllm_ascend_pd.up.cli import START_TIMEOUT_S
from vllm_ascend_pd.up.machine import prepare_machine
from vllm_ascend_pd.up.plan import Deployment, Instance, Role, UpOptions, plan_deployment
from vllm_ascend_pd.up.report import StartProgress, print_endpoints
from vllm_ascend_pd.up.status import fetch_status
from vllm_ascend_pd.up.supervise import Supervisor

LOG_DIR: Final = Path(__file__).resolve().parent.parent / "logs" / "serve"
PROMPTS: Final = ("What is the largest animal in the world?", "Q: What is the capital of France?\nA:")
MAX_TOKENS: Final = 24
REQUEST_TIMEOUT_S: Final = 120.0
# float32 and no compilation: what takes seconds to start and is exact on every CPU.
SERVE_ARGS: Final = (
    *("--served-model-name", NAME),
    *("--dtype", "float32"),
    *("--max-model-len", "2048"),
    "--enforce-eager",
)


@dataclass(frozen=True)
class Answer:
    """One greedy completion."""

    text: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Moved:
    """What the counters of a decode instance say about one request."""

    num_tokens: int
    num_bytes: int
    num_transfers: int
    stage_ms: Mapping[str, float]


@dataclass(frozen=True)
class Trial:
    """One prompt, answered by both servers."""

    prompt: str
    paired: Answer
    aggregated: Answer
    moved: Moved

    @property
    def problem(self) -> str | None:
        """Why this trial does not prove what it should; None when it does."""
        if self.paired.prompt_token_ids != self.aggregated.prompt_token_ids:
            return "the two servers read different prompt tokens"
        if self.paired.token_ids != self.aggregated.token_ids:
            return f"tokens {list(self.paired.token_ids)}, aggregated {list(self.aggregated.token_ids)}"
        expected = len(self.paired.prompt_token_ids) - 1
        if self.moved.num_tokens != expected:
            return f"KV of {self.moved.num_tokens} prompt tokens came from the prefill instance, not of {expected}"
        return None


def ask(client: httpx.Client, instance: Instance, prompt: str) -> Answer:
    """A greedy completion with its token ids. Raises httpx.HTTPError when the server answers with an error."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    started = time.monotonic()
    answer = client.post(f"{instance.url}/v1/completions", json=body)
    if answer.is_error:
        raise httpx.HTTPError(f"{instance.name} answers {answer.status_code}: {answer.text[:500]}")
    choice = answer.json()["choices"][0]
    return Answer(
        text=choice["text"],
        prompt_token_ids=tuple(choice["prompt_token_ids"]),
        token_ids=tuple(choice["token_ids"]),
        seconds=time.monotonic() - started,
    )


def read_counters(client: httpx.Client, decode: Instance) -> dict[str, float]:
    """Flat counters since start: those of `/pd/status`, and the seconds of the ask from `/metrics`."""
    totals = fetch_status(decode.url).get("totals", {})
    counters = {name: float(totals.get(name, 0)) for name in ("tokens_loaded_remotely", "bytes_pulled", "transfers")}
    seconds = {f"seconds.{stage}": float(value) for stage, value in totals.get("seconds", {}).items()}
    metrics = client.get(f"{decode.url}/metrics").text
    return {"seconds.ask": read_metric(metrics, "vllm:pd_ask_seconds_sum"), **counters, **seconds}


def read_metric(text: str, name: str) -> float:
    """Sum of all series of one metric in Prometheus' text format; 0 when there is none."""
    total = 0.0
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] == name:
            total += float(value)
    return total


def compute_moved(before: Mapping[str, float], after: Mapping[str, float]) -> Moved:
    """The difference of two readings of the counters."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    stages = {name.removeprefix("seconds."): 1000 * v for name, v in grown.items() if name.startswith("seconds.")}
    return Moved(
        num_tokens=int(grown["tokens_loaded_remotely"]),
        num_bytes=int(grown["bytes_pulled"]),
        num_transfers=int(grown["transfers"]),
        stage_ms=stages,
    )


def run_trials(deployment: Deployment) -> list[Trial]:
    """Every prompt, first through the pair and then through the aggregated server."""
    decode = deployment.of_role(Role.DECODE)[0]
    aggregated = deployment.of_role(Role.AGGREGATED)[0]
    trials = []
    with httpx.Client(trust_env=False, timeout=REQUEST_TIMEOUT_S) as client:
        for prompt in PROMPTS:
            before = read_counters(client, decode)
            paired = ask(client, decode, prompt)
            moved = compute_moved(before, read_counters(client, decode))
            trials.append(Trial(prompt, paired, ask(client, aggregated, prompt), moved))
    return trials


def print_trials(trials: list[Trial], console: Console) -> bool:
    """The report; True when every trial proves what it should."""
    for trial in trials:
        num_prompt = len(trial.paired.prompt_token_ids)
        stages = "   ".join(f"{stage} {ms:.1f}" for stage, ms in trial.moved.stage_ms.items())
        table = Table.grid(padding=(0, 2))
        rows: dict[str, Any] = {
            "prompt": repr(trial.prompt),
            "answer": repr(trial.paired.text),
            "KV from prefill": f"{trial.moved.num_tokens} of {num_prompt} prompt tokens, "
            f"{trial.moved.num_bytes:,} bytes in {trial.moved.num_transfers} transfer(s)",
            "stages, ms": stages,
            "whole answer": f"{trial.paired.seconds:.2f} s for {len(trial.paired.token_ids)} tokens "
            f"(aggregated {trial.aggregated.seconds:.2f} s)",
        }
        for name, value in rows.items():
            table.add_row(Text(f"  {name}", "cyan"), Text(value))
        console.print(table)
        console.print()
    problems = [f"{trial.prompt!r}: {trial.problem}" for trial in trials if trial.problem]
    for problem in problems:
        console.print(f"[red]{problem}[/]", soft_wrap=True)
    same = all(trial.paired.token_ids == trial.aggregated.token_ids for trial in trials)
    console.print(f"same tokens as aggregated: {'yes' if same else 'no'}")
    return not problems


def serve(model: Path, *, once: bool) -> int:
    """Start, try, report, then serve until Ctrl-C; the exit code."""
    console = Console()
    options = UpOptions(model=str(model), serve_args=SERVE_ARGS, compare=True)
    with prepare_machine(options, log_dir=LOG_DIR / time.strftime("%Y%m%d-%H%M%S")) as machine:
        deployment = plan_deployment(options, machine)
        progress = StartProgress()
        with sigterm_as_interrupt(), Supervisor(deployment, progress) as supervisor:
            supervisor.start()
            supervisor.wait_ready(START_TIMEOUT_S)
            progress.close()
            console.print(f"\n[bold]{NAME}[/], prefill and decode in two servers\n")
            is_good = print_trials(run_trials(deployment), console)
            if once or not is_good:
                return 0 if is_good else 1
            supervisor.stop(deployment.of_role(Role.AGGREGATED)[0])
            print_endpoints(deployment, console)
            supervisor.watch()
    return 0


def main() -> int:
    """Entry point of `make serve`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a folder: nothing is looked up
    try:
        return serve(ensure_demo_model(), once=os.environ.get("ONCE", "") not in ("", "0"))
    except (PDError, CacheError, httpx.HTTPError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
