# SPDX-License-Identifier: Apache-2.0
import io
import json
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from vllm_ascend_pd.up.plan import Machine, UpOptions, plan_deployment
from vllm_ascend_pd.up.report import (
    StartProgress,
    choose_log_line,
    make_curl,
    print_endpoints,
    shorten_log_line,
)


@pytest.fixture
def deployment():
    machine = Machine(("vllm", "serve"), (9000, 9001), (0, 1), True, Path("/logs"), Path("/secret"))
    return plan_deployment(UpOptions("it's a model"), machine)


@pytest.mark.parametrize(
    ("line", "short"),
    [
        ("\x1b[0;36m(APIServer pid=7)\x1b[0;0m INFO 12-02 03:04:05 [loader.py:12] Loading weights", "Loading weights"),
        ("(EngineCore pid=7) WARNING 12-02 03:04:05 [a.py:1] careful", "careful"),
        ("Loading safetensors: 50%", "Loading safetensors: 50%"),
        ("INFO:     Started server process [1]", "Started server process [1]"),
        ("", ""),
    ],
)
def test_a_log_line_is_shown_without_what_every_line_repeats(line, short):
    assert shorten_log_line(line) == short


def test_a_long_line_is_cut_to_the_width():
    assert shorten_log_line("x" * 200, width=10) == "x" * 9 + "…"


def test_the_curl_goes_to_decode_and_survives_a_shell(deployment):
    words = shlex.split(make_curl(deployment))
    assert words[2] == "http://127.0.0.1:9001/v1/completions"
    assert json.loads(words[-1])["model"] == "it's a model"


def test_the_line_shown_is_the_newest_that_tells_something():
    lines = ["INFO 12-02 03:04:05 [omp.py:1] OpenMP binding:", "  local_rank=0", "  reserved_cpus=[]"]
    assert choose_log_line(lines) == "OpenMP binding:"
    assert (
        choose_log_line(["(EngineCore pid=1) Loading safetensors: 3%", "  warnings.warn("]) == "Loading safetensors: 3%"
    )
    assert choose_log_line(["no level", "at all"]) == "at all"
    assert choose_log_line([]) == ""


def test_where_nothing_can_be_redrawn_each_instance_speaks_when_it_has_moved_on(deployment):
    out = io.StringIO()
    progress = StartProgress(Console(file=out, width=200))
    prefill = deployment.instances[0]
    progress.starting(prefill)
    for second in range(25):
        progress.waiting(prefill, float(second), [f"INFO 12-02 03:04:05 [a.py:1] step [{second}]"])
    for second in range(25, 90):
        progress.waiting(prefill, float(second), ["INFO 12-02 03:04:05 [a.py:1] step [20]"])
    progress.ready(prefill, 90.0)
    lines = out.getvalue().splitlines()
    said = [line.split() for line in lines if "step" in line]
    assert [(words[1], words[-1]) for words in said] == [("10", "[10]"), ("20", "[20]"), ("80", "[20]")]
    assert lines[-1] == "prefill-0 ready after 90 s"


def test_the_endpoints_name_every_instance_and_the_logs(deployment):
    out = io.StringIO()
    print_endpoints(deployment, Console(file=out, width=200))
    text = out.getvalue()
    for word in ("decode-0", "http://127.0.0.1:9001", "prefill-0", "http://127.0.0.1:9000", "/logs", "curl"):
        assert word in text
