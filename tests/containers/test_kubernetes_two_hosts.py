# SPDX-License-Identifier: Apache-2.0
"""Instances over two hosts: by schema, by the real parser with the variables put in, and whether the halves fit."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.containers.test_flags import parser
from tests.containers.test_kubernetes import VERSIONS, validate
from tools.containers.manifests import DEPLOY, read_objects
from vllm_ascend_pd.config import PDConfig
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.front.serve_args import settle_serve_args

OBJECTS = {
    f"{path.stem} {thing['kind']} {thing['metadata']['name']}": thing
    for path in sorted((DEPLOY / "kubernetes/two-hosts").glob("*.yaml"))
    for thing in read_objects(path)
}
INSTANCES = {name: thing for name, thing in OBJECTS.items() if thing["kind"] == "LeaderWorkerSet"}
PARTS = ("leaderTemplate", "workerTemplate")
ADDRESSES = {"leaderTemplate": "10.0.0.1", "workerTemplate": "10.0.0.2"}
LEADER_NAME = "pd-x-0.pd-x.default"


def pod(name: str, part: str) -> dict[str, Any]:
    """The spec of one of the two pods."""
    found: dict[str, Any] = INSTANCES[name]["spec"]["leaderWorkerTemplate"][part]["spec"]
    return found


def server(name: str, part: str) -> dict[str, Any]:
    """The pod's container."""
    (found,) = pod(name, part)["containers"]
    assert isinstance(found, dict)
    return found


def environment(name: str, part: str) -> dict[str, str]:
    """What Kubernetes gives the container, with what LeaderWorkerSet puts before it."""
    index = str(PARTS.index(part))
    values = {"LWS_LEADER_ADDRESS": LEADER_NAME, "LWS_WORKER_INDEX": index, "LWS_GROUP_SIZE": "2"}
    for one in server(name, part).get("env", ()):
        if "value" in one:
            values[one["name"]] = expand(one["value"], values)
        else:
            assert one["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
            values[one["name"]] = ADDRESSES[part]
    return values


def expand(word: str, values: dict[str, str]) -> str:
    """`$(NAME)`; an unknown one, which Kubernetes would leave as it is, is an error."""
    return re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], word)


def arguments(name: str, part: str) -> list[str]:
    """After `serve`, as the server gets them."""
    words = [expand(word, environment(name, part)) for word in server(name, part)["args"]]
    assert words[0] == "serve"
    return words[1:]


def parse(words: list[str], variables: dict[str, str], secret: Path) -> tuple[Any, PDConfig]:
    """Parsed and settled, with a secret of ours."""
    parsed = parser().parse_args([re.sub(r"^(--pd-secret-file)=.*", rf"\1={secret}", word) for word in words])
    config = settle_serve_args(parsed, variables)
    assert config is not None
    return parsed, config


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", OBJECTS)
def test_it_is_what_the_schema_says(name: str, version: str):
    validate(OBJECTS[name], version)


@pytest.mark.parametrize("place", ["sise", "leaderTemplate.spec.hostnet", "workerTemplate.spec.hostnet"])
def test_the_schemas_look_into_both_pods(place: str):
    thing = copy.deepcopy(INSTANCES["a2 LeaderWorkerSet pd-prefill"])
    *path, last = place.split(".")
    target = thing["spec"]["leaderWorkerTemplate"]
    for key in path:
        target = target[key]
    target[last] = 1
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(thing)


def test_there_is_an_instance_of_each_role():
    assert list(INSTANCES) == ["a2 LeaderWorkerSet pd-prefill", "a2 LeaderWorkerSet pd-decode"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", INSTANCES)
def test_the_real_parser_accepts_both_pods_as_nodes_of_one_instance(
    name: str, secret: Path, monkeypatch: pytest.MonkeyPatch
):
    size = INSTANCES[name]["spec"]["leaderWorkerTemplate"]["size"]
    nodes = []
    for part in PARTS:
        monkeypatch.setenv("VLLM_HOST_IP", environment(name, part)["VLLM_HOST_IP"])
        parsed, config = parse(arguments(name, part), environment(name, part), secret)
        assert (parsed.nnodes, parsed.pd_role) == (size, name.rpartition("-")[2])
        assert config.advertise_host == ADDRESSES[part], "where peers look for this host's ranks"
        assert parsed.tensor_parallel_size == size * server(name, part)["resources"]["limits"]["huawei.com/Ascend910"]
        nodes.append(parsed)
    assert [(one.node_rank, one.headless) for one in nodes] == [(0, False), (1, True)]
    assert [one.master_addr for one in nodes] == [ADDRESSES["leaderTemplate"], LEADER_NAME]
    assert nodes[0].master_port == nodes[1].master_port
    assert not 20000 <= nodes[0].master_port < 36000, "NPUs use them"
    assert nodes[0].master_port != nodes[0].port


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--host=10.0.0.2", "--host=0.0.0.0"), "needs --host"),
        (("--node-rank=1", "--node-rank=0"), "--headless runs without it"),
        (("--pd-secret-file=/pd-secret/secret", "--seed=1"), "no secret|needs --pd-secret-file"),
    ],
)
def test_our_checks_refuse_a_worker_that_others_would_not_reach(change: tuple[str, str], words: str, secret: Path):
    name = "a2 LeaderWorkerSet pd-prefill"
    given = arguments(name, "workerTemplate")
    assert change[0] in given
    changed = [change[1] if word == change[0] else word for word in given]
    with pytest.raises(PDConfigError, match=words):
        parse(changed, environment(name, "workerTemplate"), secret)


@pytest.mark.parametrize("name", INSTANCES)
def test_the_pods_differ_only_in_what_makes_one_the_leader(name: str):
    def flags(part: str) -> list[str]:
        own = r"--(host|port|node-rank|master-addr)=.*|--headless"
        return [word for word in arguments(name, part) if not re.fullmatch(own, word)]

    assert flags("leaderTemplate") == flags("workerTemplate")
    leader, worker = (server(name, part) for part in PARTS)
    own = {"args", "ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"}
    assert {k: v for k, v in leader.items() if k not in own} == {k: v for k, v in worker.items() if k != "args"}
    assert {**pod(name, PARTS[0]), "containers": []} == {**pod(name, PARTS[1]), "containers": []}


@pytest.mark.parametrize("name", INSTANCES)
def test_a_pod_is_as_those_of_the_manifests_for_one_host(name: str):
    """The same user, secret, mounts and rights; the size of the set is what differs."""
    (single,) = (
        thing
        for thing in read_objects(DEPLOY / f"kubernetes/{name.split()[0]}.yaml")
        if (thing["kind"], thing["metadata"]["name"]) == ("LeaderWorkerSet", name.split()[-1])
    )
    other = single["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    assert {**pod(name, "leaderTemplate"), "containers": []} == {**other, "containers": []}
    for key in ("image", "securityContext", "volumeMounts", "ports", "resources", "readinessProbe", "livenessProbe"):
        assert server(name, "leaderTemplate")[key] == other["containers"][0][key], key


@pytest.mark.parametrize("name", INSTANCES)
def test_a_group_starts_together_and_is_replaced_together(name: str):
    spec = INSTANCES[name]["spec"]
    assert spec["startupPolicy"] == "LeaderCreated", "the leader becomes ready only with its worker"
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    probe = server(name, "leaderTemplate")["startupProbe"]
    waits = [word for word in arguments(name, "leaderTemplate") if word.startswith("--pd-start-timeout")]
    assert waits == (["--pd-start-timeout=30m"] if name.endswith("decode") else [])
    assert probe["periodSeconds"] * probe["failureThreshold"] > 30 * 60


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_its_service_finds_the_leader_only(role: str):
    service = OBJECTS[f"a2 Service pd-{role}-http"]["spec"]
    assert service["selector"] == {
        "leaderworkerset.sigs.k8s.io/name": f"pd-{role}",
        "leaderworkerset.sigs.k8s.io/worker-index": "0",
    }
    leader = server(f"a2 LeaderWorkerSet pd-{role}", "leaderTemplate")
    (port,) = service["ports"]
    assert leader["ports"] == [{"name": port["targetPort"], "containerPort": port["port"]}]
    assert f"--port={port['port']}" in leader["args"]
    template = INSTANCES[f"a2 LeaderWorkerSet pd-{role}"]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(port["port"])


def test_decode_asks_the_headless_service_of_prefill():
    words = arguments("a2 LeaderWorkerSet pd-decode", "leaderTemplate")
    service = OBJECTS["a2 Service pd-prefill-http"]
    assert words[words.index("--pd-prefill") + 1] == f"dns+http://pd-prefill-http:{service['spec']['ports'][0]['port']}"
    assert service["spec"]["clusterIP"] == "None"
