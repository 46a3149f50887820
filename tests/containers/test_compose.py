# SPDX-License-Identifier: Apache-2.0
"""The compose files, by the compose specification and by what a pair needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml

from tools.containers import dockerfile
from tools.containers.images import ROOT
from tools.containers.manifests import ManifestError, interpolate, list_compose, read_compose

NEEDED = {"MODEL_DIR": "/models/of/mine", "PD_SECRET_FILE": "/secrets/of/mine"}
FILES = {str(path.relative_to(ROOT / "deploy")): path for path in list_compose()}
STAGES = dockerfile.read(ROOT / "Dockerfile")


def validate(document: dict[str, Any]) -> None:
    """By the specification: unknown keys, shapes, names that nothing defines."""
    compose_spec.PyCompose.from_yaml(yaml.safe_dump(document)).validate()


def servers(name: str) -> dict[str, dict[str, Any]]:
    """The services that are ours."""
    return {key: one for key, one in read_compose(FILES[name], NEEDED)["services"].items() if key != "router"}


@pytest.mark.parametrize("name", FILES)
def test_it_is_a_compose_file(name: str):
    validate(read_compose(FILES[name], NEEDED))


@pytest.mark.parametrize(
    "change", [{"imagee": "x"}, {"depends_on": {"prefill": {"condition": "service_fine"}}}, {"secrets": ["no-such"]}]
)
def test_the_specification_refuses_what_is_wrong(change: dict[str, Any]):
    document = read_compose(FILES["compose/cpu.yaml"], NEEDED)
    document["services"]["decode"] |= change
    with pytest.raises(Exception, match="imagee|service_fine|no-such"):
        validate(document)


@pytest.mark.parametrize("missing", NEEDED)
def test_a_variable_that_must_be_set_is_asked_for_by_name(missing: str):
    with pytest.raises(ManifestError, match=missing):
        read_compose(FILES["compose/cpu.yaml"], {name: value for name, value in NEEDED.items() if name != missing})


def test_variables_are_put_in_as_compose_does():
    text = "${A:-b} ${C} $C $$D ${E-f} ${C:?no}"
    assert interpolate(text, {"C": "c", "E": ""}) == "b c c $D  c"


@pytest.mark.parametrize("name", FILES)
def test_both_sides_run_unprivileged_as_the_owner_of_the_secret(name: str):
    given = read_compose(FILES[name], {**NEEDED, "PD_UID": "501"})["services"]
    for key, service in given.items():
        if key == "router":
            continue
        assert service["user"] == "501:0"
        assert service["cap_drop"] == ["ALL"]
        assert not service.get("privileged")
        assert service["secrets"] == ["pd-secret"]
        assert "--pd-secret-file=/run/secrets/pd-secret" in service["command"]


@pytest.mark.parametrize("name", FILES)
def test_decode_waits_for_a_healthy_prefill_and_each_can_finish_when_stopped(name: str):
    for role, service in servers(name).items():
        timeout = int(next(word for word in service["command"] if "--shutdown-timeout" in word).partition("=")[2])
        assert int(service["stop_grace_period"].rstrip("s")) > timeout
        if role == "decode" and "router" not in name:
            assert service["depends_on"]["prefill"]["condition"] == "service_healthy"
        assert service["build"]["target"] in STAGES


def test_each_npu_belongs_to_one_instance_and_all_have_the_drivers_devices():
    seen: list[str] = []
    for service in servers("compose/a2.yaml").values():
        names = [entry.split(":")[0] for entry in service["devices"]]
        npus = [name for name in names if name.removeprefix("/dev/davinci").isdigit()]
        assert set(names) - set(npus) == {"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"}
        assert f"--tensor-parallel-size={len(npus)}" in service["command"]
        assert service["group_add"] == ["1000"]
        seen += npus
    assert sorted(seen) == [f"/dev/davinci{number}" for number in range(8)]


def test_an_npu_instance_sees_the_hosts_driver_and_addresses_read_only():
    for service in servers("compose/a2.yaml").values():
        mounts = {Path(entry.split(":")[1]): entry.split(":")[-1] for entry in service["volumes"]}
        for path in (
            "/usr/local/Ascend/driver",
            "/usr/local/bin/npu-smi",
            "/etc/hccn.conf",
            "/etc/ascend_install.info",
        ):
            assert mounts[Path(path)] == "ro"
