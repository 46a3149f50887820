# SPDX-License-Identifier: Apache-2.0
"""How a stage is carried out, as far as it needs no root: configuration, variables, layers, what runs where."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.containers import dockerfile, images, roots
from tools.containers.dockerfile import DockerfileError
from tools.containers.images import Builder, Image, Site
from tools.containers.roots import Bind, Run

TEXT = """
ARG BASE=clean
FROM clean AS wheel
ARG LANE=cpu
RUN /docker/wheel.sh "$LANE"

FROM ${BASE} AS final
ARG PD_UID=1000
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist /docker/install.sh /dist
RUN --mount=type=bind,source=docker/user.sh,target=/docker/user.sh /docker/user.sh "$PD_UID"
ENV HOME=/home/x
LABEL a.b="${HOME}"
WORKDIR /home/x
USER ${PD_UID}:0
HEALTHCHECK --interval=1s CMD ["healthcheck"]
ENTRYPOINT ["vllm"]
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Every command that would run in a root; instead it leaves a wheel."""
    seen: list[Run] = []

    def fake(what: Run, **_: object) -> None:
        seen.append(what)
        assert what.upper is not None
        (what.upper / "dist").mkdir()
        (what.upper / "dist/vllm-1.whl").write_text("wheel")

    monkeypatch.setenv("VLLM_PD_CACHE", str(tmp_path))
    monkeypatch.setattr(roots, "run", fake)
    return seen


def new_builder(text: str = TEXT, site: Site | None = None, **arguments: str) -> Builder:
    """With one base, and no need of this machine."""
    stages = dockerfile.parse(text)
    return Builder(stages, site or Site(), arguments, {"clean": Image((Path("/base"),), "key of base")})


def test_the_configuration_is_that_of_the_stage(ran: list[Run]):
    image = new_builder(PD_UID="7").build("final")
    assert (image.user, image.folder, image.entrypoint, image.health) == ("7:0", "/home/x", ("vllm",), ("healthcheck",))
    assert (image.env, image.labels) == ({"HOME": "/home/x"}, {"a.b": "/home/x"})
    assert [run.env["PD_UID"] for run in ran if "user.sh" in run.command[-1]] == ["7"]


def test_a_mount_from_a_stage_builds_that_stage_first(ran: list[Run]):
    builder = new_builder()
    builder.build("final")
    assert [run.command[-1].split()[0] for run in ran] == ["/docker/wheel.sh", "/docker/install.sh", "/docker/user.sh"]
    (dist,) = ran[1].binds
    assert (dist.target, dist.writable, (dist.source / "vllm-1.whl").read_text()) == ("/dist", False, "wheel")
    assert ran[0].env["LANE"] == "cpu"
    assert "LANE" not in ran[1].env, "an ARG ends with its stage"


def test_a_layer_is_found_again_until_something_that_goes_into_it_changes(ran: list[Run]):
    first = new_builder().build("final")
    assert new_builder().build("final") == first
    assert len(ran) == 3
    new_builder(LANE="ascend").build("final")
    assert [run.command[-1].split()[0] for run in ran[3:]] == ["/docker/wheel.sh"], "the wheel came out the same"
    new_builder(PD_UID="8").build("final")
    assert len(ran) == 6, "both steps below the ARG"


def test_a_working_folder_is_made_only_where_there_is_none(ran: list[Run]):
    image = new_builder().build("final")
    assert (image.layers[-1] / "home/x").is_dir()
    text = TEXT.replace("WORKDIR /home/x", "WORKDIR /dist")
    assert new_builder(text).build("final").layers == image.layers[:-1], "a step made it, with an owner of its own"


def test_a_failed_step_leaves_no_layer(ran: list[Run], monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise roots.CacheError("no")

    monkeypatch.setattr(roots, "run", fail)
    with pytest.raises(roots.CacheError):
        new_builder().build("wheel")
    assert not list((roots.get_store() / "layers").iterdir())


def test_steps_that_are_left_out_are_named(ran: list[Run]):
    builder = new_builder()
    builder.skip = ("install.sh",)
    builder.build("final")
    assert builder.skipped == ["/docker/install.sh /dist"]
    assert [text.split()[0] for text in builder.executed] == ["/docker/user.sh"]


def test_what_this_machine_needs_is_in_every_step_and_in_no_key(ran: list[Run], tmp_path: Path):
    site = Site({"SSL_CERT_FILE": "/site/c"}, (Bind(tmp_path, "/site/c"),))
    image = new_builder(site=site).build("final")
    assert all(run.env["SSL_CERT_FILE"] == "/site/c" and run.binds[-1].target == "/site/c" for run in ran)
    assert new_builder().build("final").key == image.key
    assert "SSL_CERT_FILE" not in image.env


def test_only_the_newest_layers_are_kept(ran: list[Run]):
    new_builder().build("final")
    stamps = sorted((roots.get_store() / "layers").glob("*/layer.json"))
    for age, stamp in enumerate(stamps):
        os.utime(stamp, (1000 - age, 1000 - age))
    images.prune_layers(keep=2)
    assert sorted((roots.get_store() / "layers").glob("*/layer.json")) == stamps[:2]


@pytest.mark.parametrize("line", ["COPY docker /x", "FROM nowhere AS other\nRUN /docker/a.sh"])
def test_what_it_cannot_carry_out_is_an_error(ran: list[Run], line: str):
    with pytest.raises(DockerfileError):
        new_builder(f"FROM clean AS a\n{line}\n").build("other" if "other" in line else "a")


def test_a_command_runs_as_the_user_with_nothing_of_this_machines_environment(tmp_path: Path):
    run = Run(
        ["vllm", "a b"], [Path("/low"), Path("/high")], None, {"A": "1"}, (Bind(tmp_path, "/in"),), "7:0", "/home/x"
    )
    *unshare, script = run.argv(tmp_path)
    assert {"--mount", "--pid", "--ipc", "--kill-child"} <= set(unshare)
    assert "lowerdir=/high:/low" in script
    assert f"mount --bind {tmp_path} in" in script
    assert "remount,bind,ro in" in script
    assert script.splitlines()[-1].startswith("exec chroot --userspec=7:0 --groups= . env -i")
    assert "exec vllm '\"'\"'a b'\"'\"'" in script
    assert Run(["x"], [], network="n").argv(tmp_path)[:4] == ["ip", "netns", "exec", "n"]
