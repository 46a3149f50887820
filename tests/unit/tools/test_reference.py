# SPDX-License-Identifier: Apache-2.0
"""`docs/reference/` is what the code says, and the finders find what they are for."""

import ast
import json
import subprocess
import sys

import pytest

from tools.reference import meanings, metrics, pages, sizes, status
from tools.reference.endpoints import find_endpoints
from tools.reference.environment import find_variables
from tools.reference.errors import find_http_errors
from tools.reference.metrics import find_metrics
from tools.reference.reasons import find_fallback_reasons
from tools.reference.sources import HOLE, PACKAGE, templates
from vllm_ascend_pd.front.flags import ENV_PREFIX, TOOL_VARIABLES

BLOCKED = "import sys; sys.modules['vllm'] = sys.modules['torch'] = None; "


def test_pages_are_what_the_code_says_and_the_check_needs_no_vllm():
    code = BLOCKED + "sys.argv[1:] = ['check']; from tools.reference.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, f"run `python -m tools.reference write`:\n{done.stdout}{done.stderr}"


@pytest.fixture
def one_page(monkeypatch):
    """All pages take seconds; one shows as much."""
    monkeypatch.setattr(pages, "PAGES", {"metrics.md": metrics.render})


def test_a_changed_help_is_drift(tmp_path, monkeypatch, one_page):
    pages.write_pages(tmp_path)
    assert pages.find_drift(tmp_path) == []
    name, (metric, _) = next(iter(metrics.COUNTERS.items()))
    monkeypatch.setitem(metrics.COUNTERS, name, (metric, "Something else."))
    metrics.find_metrics.cache_clear()
    (drift,) = pages.find_drift(tmp_path)
    metrics.find_metrics.cache_clear()
    assert metric in drift
    assert "Something else." in drift


def test_a_page_that_nobody_writes_is_drift_and_is_removed(tmp_path, one_page):
    pages.write_pages(tmp_path)
    (tmp_path / "old.md").write_text("x")
    assert pages.find_drift(tmp_path) == ["docs/reference/old.md: no page of this name"]
    assert pages.write_pages(tmp_path) == ["old.md"]
    assert pages.find_drift(tmp_path) == []


def test_every_reason_has_a_meaning_and_no_meaning_is_left_over():
    assert set(find_fallback_reasons()) == set(meanings.FALLBACKS)


@pytest.mark.parametrize("reason", ["n>1", "no_handoff", "ask_busy", "load_link", "load_lease_expired", "deadline"])
def test_reasons_of_each_kind_are_found(reason):
    assert reason in find_fallback_reasons()


def test_variables_that_are_described_are_read():
    assert set(meanings.VARIABLES) <= set(find_variables())


def test_every_variable_of_ours_is_known_to_the_server():
    ours = {name for name in find_variables() if name.startswith(ENV_PREFIX)}
    assert ours <= set(TOOL_VARIABLES), "`vllm serve` would refuse to start where one of them is set"


def test_metrics_of_both_processes_are_found():
    found = {metric.scraped: metric for metric in find_metrics()}
    assert found["vllm:pd_ask_failures_total"].labels == ("reason",)
    assert found["vllm:pd_stage_seconds"].labels == ("model_name", "engine", "stage")
    assert found["vllm:pd_transfers_total"].kind == "counter"


def test_endpoints_tell_who_may_ask():
    found = {endpoint.path: endpoint for endpoint in find_endpoints()}
    assert found["/pd/prefill"].signed
    assert found["/pd/prefill"].roles == "prefill"
    assert not found["/pd/status"].signed
    assert found["/pd/status"].roles == "both"


@pytest.mark.parametrize("section", status.described())
def test_every_field_of_the_status_has_a_meaning_and_none_is_left_over(section):
    assert status.find_fields()[section] == set(status.described()[section])


def test_errors_that_clients_meet_are_found():
    found = {(status, code) for status, code, _, _ in find_http_errors()}
    assert {("503", "pd_kv_unavailable"), ("504", "pd_deadline"), ("401", "pd_unauthorized")} <= found


def test_templates_have_holes_and_no_docstrings():
    tree = ast.parse('"""Doc."""\nx = f"a {1} b" "c"\ny = "d"')
    assert sorted(templates(tree)) == [f"a {HOLE} bc", "d"]


@pytest.mark.parametrize(
    ("config", "token_bytes", "rank_bytes"),
    [
        ({"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64}, 2 * 2 * 8 * 8 * 2, 2 * 2 * 1 * 8 * 2),
        ({"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}, 32, 16),
        ({"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 3456, 3456),
    ],
)
def test_kv_of_a_configuration_by_hand(tmp_path, config, token_bytes, rank_bytes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    model = sizes.read_config(path)
    assert model.token_bytes == token_bytes
    assert model.rank_token_bytes(8) == rank_bytes
    assert model.moved_token_bytes(8) == 8 * rank_bytes


def test_sizes_agree_with_those_that_the_bench_moves():
    from vllm_ascend_pd.bench.stages.shapes import SHAPES

    ours = {model.token_bytes for model in sizes.MODELS}
    assert {shape.token_bytes for shape in SHAPES} <= ours
