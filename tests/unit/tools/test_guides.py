# SPDX-License-Identifier: Apache-2.0
"""The pages of the repository say nothing that the code does not know: commands, names, log lines, links."""

import importlib.util
import re
from pathlib import Path

import pytest

from tools.reference.guides import (
    SHELLS,
    Block,
    find_blocks,
    find_broken_links,
    find_commands,
    find_printed,
    find_unknown_names,
    find_unprinted_lines,
    list_files,
)
from tools.reference.shown_commands import VLLM_FLAGS, check_command
from tools.reference.sources import ROOT

FILES = list_files()
NAMES = [str(file.relative_to(ROOT)) for file in FILES]


@pytest.fixture(scope="module")
def printed():
    return find_printed()


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_commands_parse(file):
    problems = [
        f"{block.where}: {' '.join(words)}\n  {problem}"
        for block in find_blocks(file)
        if block.language in SHELLS
        for variables, words in find_commands(block)
        if (problem := check_command(variables, words))
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_links_and_names_exist(file):
    assert not [*find_broken_links(file), *find_unknown_names(file)]


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_quoted_log_lines_are_printed_by_the_code(file, printed):
    blocks = [block for block in find_blocks(file) if block.language == "log"]
    assert not [problem for block in blocks for problem in find_unprinted_lines(block, printed)]


def test_every_guide_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    pages = [file.relative_to(ROOT / "docs").as_posix() for file in FILES if ROOT / "docs" in file.parents]
    missing = [page for page in pages if f"({page})" not in index and page != "README.md" and "decisions/" not in page]
    assert not missing


@pytest.mark.parametrize(
    ("name", "said"), [("PREFILL_SLOTS", "64 MiB on prefill (4 slots"), ("DECODE_SLOTS", "32 MiB on decode (2 slots)")]
)
def test_sizing_tells_the_staging_buffers_of_the_code(name, said):
    from vllm_ascend_pd.transfer.staging import reserve as staging
    from vllm_ascend_pd.transfer.staging.chunks import SLOT_BYTES

    slots = getattr(staging, name)
    assert f"{slots * SLOT_BYTES >> 20} MiB" in said
    assert f"{slots} slots" in said
    assert said in (ROOT / "docs/sizing.md").read_text()


@pytest.mark.parametrize("page", ["docs/guides/one-server.md", "docs/troubleshooting.md"])
def test_guides_tell_the_versions_that_the_start_wants(page):
    from vllm_ascend_pd.ascend import pairing

    text = (ROOT / page).read_text()
    wanted = [
        f"CANN {pairing.CANN}",
        f"torch {pairing.TORCH}",
        f"torch-npu {pairing.TORCH_NPU}",
        f"vllm-ascend {pairing.VLLM_ASCEND}",
    ]
    assert not [version for version in wanted if version not in text]


def test_flags_of_vllm_exist_in_the_one_that_is_installed():
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    root = Path(spec.submodule_search_locations[0])
    sources = [root / "engine/arg_utils.py", *root.glob("entrypoints/**/cli_args.py"), *root.glob("config/*.py")]
    text = "\n".join(path.read_text() for path in sources)

    def is_there(flag):
        field = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        return f'"{flag}"' in text or re.search(rf"^    {field}\s*:", text, re.MULTILINE)

    assert not [flag for flag in sorted(VLLM_FLAGS) if not is_there(flag)]


# ---------------------------------------------------------------- the checks themselves


def block(text, language="sh"):
    return Block(ROOT / "README.md", 1, language, text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vllm serve M --pd-role prefil", "invalid choice"),
        ("vllm serve M --pd-roll prefill", "--pd-roll is not a flag"),
        ("vllm serve M --pd-role prefill --pd-prefill http://p:1", "needs --pd-role decode"),
        ("vllm serve M --pd-role decode --pd-lease 1h", "is not a duration"),
        ("VLLM_PD_ROLE=decode vllm serve M --pd-prefill p1:8100", "did you mean"),
        ("vllm serve M \\\n  --max-modellen 4", "--max-modellen is not a flag"),
        ("echo x && vllm pd status", "required: URL"),
        ("vllm pd up M --prefill x", "invalid int value"),
        ("vllm pd up M -- --pd-role decode", "leave it out"),
        ("vllm pd bench transfer --piece 4K --fast", "unrecognized arguments"),
        ("make sreve", "no target sreve"),
        ("python -m tools.nothing", "no module"),
    ],
)
def test_a_wrong_command_is_found(text, said):
    problems = [problem for found in find_commands(block(text)) if (problem := check_command(*found))]
    assert len(problems) == 1
    assert said in problems[0]


def test_a_name_or_link_that_does_not_exist_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.reference.guides.ROOT", tmp_path)
    file = tmp_path / "page.md"
    file.write_text(
        "# A head\n`--pd-lese` VLLM_PD_LESE `vllm:pd_lese_total` GET /pd/lese `vllm pd lese`\n[a](b.md) [c](#b-head)"
        "\n`--pd-lease` VLLM_PD_LEASE `vllm:pd_leases_granted_total` GET /pd/status `vllm pd up` [a](#a-head)"
    )
    assert len(find_unknown_names(file)) == 5
    assert len(find_broken_links(file)) == 2


def test_a_log_line_that_nothing_prints_is_found(printed):
    assert not find_unprinted_lines(block("pd decode: linked with … (engine_id=… epoch=…)", "log"), printed)
    (problem,) = find_unprinted_lines(block("pd decode: linked to …", "log"), printed)
    assert "linked to" in problem
