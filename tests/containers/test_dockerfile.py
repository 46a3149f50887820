# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile and its scripts: linted, no step outside `docker/`, and no step that nobody executes or lists."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tools.containers import dockerfile
from tools.containers.checks import ASCEND_NOT_RUN, TRIED
from tools.containers.dockerfile import DockerfileError, Stage
from tools.containers.images import ROOT
from vllm_ascend_pd.ascend import pairing

BIN = Path(sys.executable).parent
SCRIPTS = sorted((ROOT / "docker").glob("*.sh"))
TARGETS = ("cpu", "a2", "a3")
STAGES = dockerfile.read(ROOT / "Dockerfile")


def lint(program: str, *files: Path) -> str:
    """The output of a linter; empty when it has nothing to say."""
    done = subprocess.run([str(BIN / program), *map(str, files)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def test_hadolint_has_nothing_to_say():
    assert lint("hadolint", ROOT / "Dockerfile") == ""


def test_shellcheck_has_nothing_to_say():
    assert lint("shellcheck", *SCRIPTS) == ""


def test_the_linters_find_what_is_wrong(tmp_path: Path):
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp\n")
    (tmp_path / "a.sh").write_text("#!/bin/sh\necho $1\n")
    assert "DL3006" in lint("hadolint", tmp_path / "Dockerfile")
    assert "SC2086" in lint("shellcheck", tmp_path / "a.sh")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_stops_at_the_first_error(script: Path):
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/sh"
    assert "set -eu" in lines
    assert script.stat().st_mode & 0o111


@pytest.mark.parametrize("name", STAGES)
def test_every_step_is_one_script_of_this_repository(name: str):
    for one in STAGES[name].find("RUN"):
        match = re.fullmatch(r"/(?:src/)?docker/([\w-]+\.sh)((?: [\w./\"$-]+)*)", one.text)
        assert match, f"line {one.line}: {one.text} is more than a script"
        assert (ROOT / "docker" / match[1]).is_file(), one.text


def test_every_step_is_executed_by_container_test_or_listed_as_not_run():
    def texts(names: Iterable[str]) -> set[str]:
        return {one.text for name in names for one in STAGES[name].find("RUN")}

    left_out = {text for text in texts(("a2", "a3")) if any(word in text for word in ASCEND_NOT_RUN)}
    executed = {name: texts([name]) - (left_out if name in ("a2", "a3") else set()) for name in TRIED}
    for name in STAGES:
        missed = texts([name]) - executed.get(name, set())
        assert missed == (left_out & texts([name]) if name in ("a2", "a3") else set()), name
    assert left_out, "a list of what is not run that matches nothing is out of date"


@pytest.mark.parametrize("name", TARGETS)
def test_an_image_runs_as_a_user_that_kubernetes_can_tell_from_root(name: str):
    (user,) = STAGES[name].find("USER")
    assert user.text == "${PD_UID}:0"
    assert STAGES[name].find("ARG")[0].pairs == {"PD_UID": "1000"}


@pytest.mark.parametrize("name", TARGETS)
def test_an_image_says_what_it_is_and_how_to_watch_and_stop_it(name: str):
    stage = STAGES[name]
    labels = stage.find("LABEL")[0].pairs
    wanted = ("title", "description", "licenses", "version", "revision", "base.name")
    assert set(labels) == {f"org.opencontainers.image.{word}" for word in wanted}
    arguments = {k: v for one in stage.find("ARG") for k, v in one.pairs.items()}
    assert dockerfile.substitute(labels["org.opencontainers.image.base.name"], arguments) == stage.base
    (health,) = stage.find("HEALTHCHECK")
    assert health.text == 'CMD ["healthcheck"]'
    assert [one.words for one in stage.find("ENTRYPOINT")] == [["vllm"]]
    assert [one.text for one in stage.find("STOPSIGNAL")] == ["SIGTERM"]
    assert [one.text for one in stage.find("EXPOSE")] == ["8000"]


def test_a2_and_a3_differ_in_base_chip_and_words_only():
    def shape(stage: Stage) -> list[tuple[str, str]]:
        return [
            (one.keyword, re.sub(r"ascend910\w+|Atlas A.|-(910b|a3)-|A[23]_BASE", "*", one.text))
            for one in stage.instructions
        ]

    assert shape(STAGES["a2"]) == shape(STAGES["a3"])
    assert ("910b" in STAGES["a2"].base, "a3" in STAGES["a3"].base) == (True, True)


def test_the_ascend_images_hold_the_versions_that_belong_together():
    for name in ("a2", "a3"):
        arguments = {k: v for one in STAGES[name].find("ARG") for k, v in one.pairs.items()}
        assert arguments["VLLM_ASCEND_VERSION"] == pairing.VLLM_ASCEND
        assert arguments["TRITON_ASCEND_VERSION"] == pairing.TRITON_ASCEND
        assert f":{pairing.CANN}-" in STAGES[name].base


def test_a_base_is_a_build_argument():
    stages = dockerfile.read(ROOT / "Dockerfile", {"A2_BASE": "my/cann:1"})
    assert (stages["a2"].base, stages["a3"].base) == ("my/cann:1", STAGES["a3"].base)
    assert {"A2_BASE": "my/cann:1"} in [one.pairs for one in stages["a2"].find("ARG")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM a AS b\nONBUILD RUN x", "ONBUILD"),
        ("RUN x", "before the first FROM"),
        ("FROM a", "without a name"),
        ("FROM a AS b\nRUN x \\", "in the middle"),
        ("FROM ${NO} AS b", "NO has no value"),
    ],
)
def test_the_reader_refuses_what_it_does_not_know(text: str, words: str):
    with pytest.raises(DockerfileError, match=re.escape(words)):
        dockerfile.parse(text)


def test_the_reader_joins_lines_and_takes_flags_apart():
    text = (
        "FROM a AS b\nRUN --mount=type=bind,source=x,target=/y \\\n    --mount=type=cache,target=/c \\\n    /s.sh $A\n"
    )
    (one,) = dockerfile.parse(text)["b"].instructions
    assert (one.line, one.text) == (2, "/s.sh $A")
    assert one.mounts == [{"type": "bind", "source": "x", "target": "/y"}, {"type": "cache", "target": "/c"}]
