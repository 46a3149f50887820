# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes objects: by Kubernetes' schemas, and whether they fit each other and the server."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tools.containers import dockerfile
from tools.containers.images import ROOT
from tools.containers.manifests import get_pod_template, list_kubernetes, read_objects
from vllm_ascend_pd.config import PDConfig
from vllm_ascend_pd.front.watch import RESOLVE_S
from vllm_ascend_pd.up.cli import build_parser

VERSIONS = ("1.30", "1.37")  # the oldest that we say, and the newest of the package
LWS = json.loads((Path(__file__).parent / "lws_schema.json").read_text())
OBJECTS = {
    f"{path.parent.name}/{path.name} {thing['kind']} {thing['metadata']['name']}": thing
    for path in list_kubernetes()
    for thing in read_objects(path)
}
PODS = {name: template for name, thing in OBJECTS.items() if (template := get_pod_template(thing))}
LEASE_S = PDConfig.__dataclass_fields__["lease_s"].default  # of --pd-lease, which no manifest sets
PLAIN = tuple(name for name in PODS if name.startswith("kubernetes/"))


def validate(thing: dict[str, Any], version: str = VERSIONS[-1]) -> None:
    """By schema; unknown fields are errors."""
    if thing["kind"] == "ServiceMonitor":
        spec = thing["spec"]
        assert set(spec) <= {"selector", "targetLabels", "endpoints", "namespaceSelector"}
        assert all(set(one) <= {"port", "path", "interval"} for one in spec["endpoints"])
        return
    if thing["kind"] == "LeaderWorkerSet":
        jsonschema.validate(thing, LWS)
        instance = thing["spec"]["leaderWorkerTemplate"]
        for template in (instance[part] for part in ("leaderTemplate", "workerTemplate") if part in instance):
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
            kubernetes_validate.validate(pod, version, strict=True)
        return
    kubernetes_validate.validate(thing, version, strict=True)


def container(name: str) -> dict[str, Any]:
    """The server's container of a pod."""
    (found,) = PODS[name]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def argument(name: str, flag: str) -> str:
    """Its value in the container's arguments."""
    (found,) = [word.partition("=")[2] for word in container(name)["args"] if word.startswith(f"{flag}=")]
    return str(found)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", OBJECTS)
def test_it_is_what_the_schema_says(name: str, version: str):
    validate(OBJECTS[name], version)


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("kubernetes/cpu.yaml Service pd-prefill-http", "spec.clusterIp", "None"),
        ("kubernetes/a2.yaml LeaderWorkerSet pd-decode", "spec.leaderWorkerTemplate.sise", 1),
        ("kubernetes/a2.yaml LeaderWorkerSet pd-decode", "spec.leaderWorkerTemplate.restartPolicy", "Always"),
        ("kubernetes/a3.yaml LeaderWorkerSet pd-prefill", "spec.leaderWorkerTemplate.workerTemplate.spec.hostnet", 1),
        ("llm-d/pd.yaml Deployment pd-decode", "spec.template.spec.terminationGracePeriodSeconds", "90s"),
    ],
)  # fmt: skip
def test_the_schemas_refuse_what_is_wrong(name: str, place: str, value: object):
    thing = copy.deepcopy(OBJECTS[name])
    *path, last = place.split(".")
    target = thing
    for key in path:
        target = target[key]
    target[last] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(thing)


@pytest.mark.parametrize("name", [name for name in OBJECTS if " Service " in name])
def test_a_service_finds_pods_and_their_port(name: str):
    service = OBJECTS[name]
    selector = dict(service["spec"]["selector"])
    assert selector.pop("leaderworkerset.sigs.k8s.io/worker-index") == "0"
    pod = f"{name.split()[0]} LeaderWorkerSet {selector.pop('leaderworkerset.sigs.k8s.io/name')}"
    assert not selector
    ports = {port["name"]: port["containerPort"] for port in container(pod)["ports"]}
    (port,) = service["spec"]["ports"]
    assert ports[port["targetPort"]] == int(argument(pod, "--port"))
    assert service["metadata"]["name"] not in {OBJECTS[one]["metadata"]["name"] for one in PLAIN}, (
        "LeaderWorkerSet makes a Service of its own name"
    )
    if service["spec"].get("clusterIP") == "None":  # no translation of ports behind a headless one
        assert port["port"] == ports[port["targetPort"]]


@pytest.mark.parametrize("name", [name for name in PLAIN if "decode" in name])
def test_decode_finds_prefill_by_the_name_and_port_of_its_service(name: str):
    words = container(name)["args"]
    url = words[words.index("--pd-prefill") + 1]
    match = re.fullmatch(r"dns\+http://([\w-]+):(\d+)", url)
    assert match
    service = OBJECTS[f"{name.split()[0]} Service {match[1]}"]
    assert service["spec"]["clusterIP"] == "None"
    assert not service["spec"].get("publishNotReadyAddresses")
    assert service["spec"]["ports"][0]["port"] == int(match[2])


@pytest.mark.parametrize("name", PODS)
def test_probes_ask_health_on_the_servers_port_and_liveness_is_the_slowest(name: str):
    probes = {kind: container(name)[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
    ports = {port["name"]: port["containerPort"] for port in container(name)["ports"]}
    for probe in probes.values():
        assert probe["httpGet"]["path"] == "/health"
        assert ports[probe["httpGet"]["port"]] == int(argument(name, "--port"))
    spans = {kind: probe["periodSeconds"] * probe["failureThreshold"] for kind, probe in probes.items()}
    assert spans["readiness"] < spans["liveness"] < spans["startup"]
    assert spans["startup"] > 600, "decode waits so long for its first prefill instance (--pd-start-timeout)"


@pytest.mark.parametrize("name", PODS)
def test_a_stopping_pod_is_drained_and_has_time_to_finish(name: str):
    command = container(name)["lifecycle"]["preStop"]["exec"]["command"]
    waits_s = 0
    if command[0] == "sh":  # out of the Service first, or clients meet the 503
        match = re.fullmatch(r"sleep (\d+); exec (.+)", command[2])
        assert match, command
        waits_s, command = int(match[1]), match[2].split()
    asked_by_instances = argument(name, "--pd-role") == "prefill" and not name.startswith("llm-d")
    assert (waits_s > RESOLVE_S) is not asked_by_instances
    assert command[:2] == ["vllm", "pd"]
    parsed = build_parser().parse_args(command[2:])
    assert (parsed.verb, parsed.url) == ("drain", f"http://127.0.0.1:{argument(name, '--port')}")
    assert parsed.pd_secret_file == argument(name, "--pd-secret-file")
    assert not any(word.startswith("--pd-lease=") for word in container(name)["args"])
    needs_s = waits_s + parsed.timeout + int(argument(name, "--shutdown-timeout")) + LEASE_S
    assert needs_s < PODS[name]["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", PODS)
def test_the_secret_reaches_the_server_as_a_file_that_only_its_user_can_read(name: str):
    spec = PODS[name]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["secret-in"]["secret"] == {"secretName": "pd-secret", "defaultMode": 0o400}
    assert volumes["secret"]["emptyDir"]["medium"] == "Memory"
    init = next(one for one in spec["initContainers"] if one["name"] == "secret")
    assert init["command"] == ["install", "-m", "0400", "/pd-secret-in/secret", "/pd-secret/secret"]
    assert argument(name, "--pd-secret-file") == init["command"][-1]
    assert [one["name"] for one in container(name)["volumeMounts"] if one["mountPath"] == "/pd-secret"] == ["secret"]
    assert "secret-in" not in {one["name"] for one in container(name)["volumeMounts"]}


@pytest.mark.parametrize("name", PODS)
def test_a_pod_is_unprivileged_and_asks_the_api_server_nothing(name: str):
    spec = PODS[name]["spec"]
    user = dockerfile.read(ROOT / "Dockerfile")["cpu"].find("ARG")[0].pairs["PD_UID"]
    security = spec["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"], security["runAsGroup"]) == (True, int(user), 0)
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False, "VLLM_PD_… variables of a Service would stop the server"
    assert "serviceAccountName" not in spec
    for one in (*spec["initContainers"], container(name)):
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert one["securityContext"]["capabilities"]["drop"] == ["ALL"]
    mounted = {
        one["name"] for part in (container(name), *spec["initContainers"]) for one in part.get("volumeMounts", ())
    }
    assert mounted == {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize("name", PODS)
def test_prometheus_scrapes_the_servers_port(name: str):
    notes = PODS[name]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == argument(name, "--port")
    assert (notes["prometheus.io/scrape"], notes["prometheus.io/path"]) == ("true", "/metrics")
    monitor = OBJECTS["kubernetes/servicemonitor.yaml ServiceMonitor vllm-pd"]["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    for label, thing in OBJECTS.items():
        if " Service " in label:
            assert wanted <= thing["metadata"]["labels"].items()
            assert monitor["endpoints"][0]["port"] in {port["name"] for port in thing["spec"]["ports"]}


@pytest.mark.parametrize("name", PLAIN)
def test_an_instance_has_as_many_npus_as_ranks(name: str):
    npus = container(name)["resources"]["limits"].get("huawei.com/Ascend910")
    assert npus == {"cpu": None, "a2": 8, "a3": 16}[name.split("/")[1].split(".")[0]]
    if npus is not None:
        assert container(name)["resources"]["requests"]["huawei.com/Ascend910"] == npus
        assert argument(name, "--tensor-parallel-size") == str(npus)
        assert PODS[name]["spec"]["securityContext"]["supplementalGroups"] == [1000]
        paths = {one["hostPath"]["path"] for one in PODS[name]["spec"]["volumes"] if "hostPath" in one}
        assert {"/usr/local/Ascend/driver", "/etc/hccn.conf", "/usr/local/bin/npu-smi"} <= paths


def test_a2_and_a3_differ_in_image_and_number_of_npus_only():
    def shape(name: str) -> str:
        text = (ROOT / f"deploy/kubernetes/{name}.yaml").read_text()
        words = r"\ba[23]\b|Atlas A[23]|(eight|sixteen) NPUs|(?<=Ascend910: )\d+|(?<=tensor-parallel-size=)\d+"
        return re.sub(words, "*", text)

    assert shape("a2") == shape("a3")


def test_llm_ds_sidecar_is_before_the_decode_server():
    spec = PODS["llm-d/pd.yaml Deployment pd-decode"]["spec"]
    sidecar = next(one for one in spec["initContainers"] if one["name"] == "routing-sidecar")
    assert sidecar["restartPolicy"] == "Always"
    assert f"--model-server-port={argument('llm-d/pd.yaml Deployment pd-decode', '--port')}" in sidecar["args"]
    assert f"--port={argument('llm-d/pd.yaml Deployment pd-prefill', '--port')}" in sidecar["args"]
    assert not [
        one for one in container("llm-d/pd.yaml Deployment pd-decode")["args"] if one.startswith("--pd-prefill")
    ]
