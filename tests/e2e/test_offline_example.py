# SPDX-License-Identifier: Apache-2.0
"""`examples/offline_pd.py` runs as the documentation says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.e2e.engines import ROOT
from tests.models import ensure_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(280)]
SCRIPT = str(ROOT / "examples" / "offline_pd.py")


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_PD_")}
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        cwd=ROOT / "examples",
        env={**base, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env},
        text=True,
        capture_output=True,
        check=False,
        timeout=270,
    )


def test_the_decode_engine_computes_only_the_last_prompt_token(tmp_path):
    done = run("--model", str(ensure_model("gqa2")), "--max-tokens", "4", XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    prompts = ["What is the largest animal in the world?", "Q: What is the capital of France?\nA:"]
    loaded = sum(len(prompt) - 1 for prompt in prompts)  # the tiny model's tokens are bytes
    assert f"{loaded} prompt tokens came from the prefill engine" in done.stdout


def test_without_a_model_and_without_the_demo_model_it_says_what_to_do(tmp_path):
    done = run(VLLM_PD_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert "--model PATH" in done.stderr
    assert "python -m tools.demo_model" in done.stderr
