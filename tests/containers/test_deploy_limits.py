# SPDX-License-Identifier: Apache-2.0
"""What a container is given must be more than its server takes: seconds to stop in, and memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from tools.containers.manifests import DEPLOY, list_compose, read_compose, read_objects
from vllm_ascend_pd.config import PDConfig, parse_duration
from vllm_ascend_pd.front.resolve import MIN_SHUTDOWN_TIMEOUT_S

NEEDED = {"MODEL_DIR": "/models/of/mine", "PD_SECRET_FILE": "/secrets/of/mine"}
DEFAULTS = {name: PDConfig.__dataclass_fields__[name].default for name in ("lease_s", "deadline_s")}
UNITS = {"": 1, "Mi": 2**20, "Gi": 2**30}
REST_BYTES = 4 * 2**30  # what a server on CPU needs beside the model and its KV: deploy/kubernetes/README.md


@dataclass(frozen=True)
class Given:
    """A server, with what its container is given."""

    words: tuple[str, ...]
    stop_s: float
    before_s: float = 0.0  # of preStop, which runs within stop_s
    memory_bytes: int = 0  # 0: no limit
    in_memory_bytes: int = 0  # volumes that count against it, when full

    def value(self, flag: str) -> str | None:
        """Of `--flag=value`."""
        found = [word.partition("=")[2] for word in self.words if word.startswith(f"{flag}=")]
        return found[-1] if found else None

    def seconds(self, flag: str, default_s: float) -> float:
        """A duration as the server reads it."""
        text = self.value(flag)
        return default_s if text is None else parse_duration(text, flag)

    @property
    def needs_s(self) -> float:
        """preStop, then running requests, then one lease for the readers of its KV."""
        deadline_s = self.seconds("--pd-deadline", DEFAULTS["deadline_s"])
        default_s = float(max(MIN_SHUTDOWN_TIMEOUT_S, math.ceil(deadline_s)))
        shutdown_s = float(self.value("--shutdown-timeout") or 0) or default_s
        return self.before_s + shutdown_s + self.seconds("--pd-lease", DEFAULTS["lease_s"])


def in_bytes(text: str) -> int:
    """Of Kubernetes' quantity."""
    match = re.fullmatch(r"(\d+)(\w*)", text)
    assert match, text
    return int(match[1]) * UNITS[match[2]]


def compute_pre_stop_s(container: dict[str, Any]) -> float:
    """Every `sleep N` and `--timeout=N` of the hook; 0 without one."""
    hook = container.get("lifecycle", {}).get("preStop")
    if hook is None:
        return 0.0
    found = re.findall(r"(?:\bsleep |--timeout=)(\S+?)(?=[;\s]|$)", " ".join(hook["exec"]["command"]))
    assert found, f"nothing says how long this takes: {hook}"
    return sum(parse_duration(one, "preStop") for one in found)


def iter_compose(documents: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Given]]:
    """The servers of compose files by name."""
    for name, document in documents.items():
        for key, service in document["services"].items():
            if service["command"][0] == "serve":
                stop_s = parse_duration(service["stop_grace_period"], "stop_grace_period")
                yield f"{name} {key}", Given(tuple(service["command"]), stop_s)


def iter_pods(objects: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, Given]]:
    """The servers of Kubernetes objects by name, of a LeaderWorkerSet both templates."""
    for name, things in objects.items():
        for thing in things:
            spec = thing["spec"]
            templates = (
                {"": spec["template"]} if thing["kind"] == "Deployment" else spec.get("leaderWorkerTemplate", {})
            )
            for part in ("", "leaderTemplate", "workerTemplate"):
                if part in templates:
                    yield f"{name} {thing['metadata']['name']} {part}".strip(), read_pod(templates[part]["spec"])


def read_pod(spec: dict[str, Any]) -> Given:
    """What its only container is given."""
    (container,) = spec["containers"]
    volumes = [one["emptyDir"] for one in spec["volumes"] if one.get("emptyDir", {}).get("medium") == "Memory"]
    return Given(
        tuple(container["args"]),
        spec["terminationGracePeriodSeconds"],
        compute_pre_stop_s(container),
        in_bytes(container["resources"]["limits"]["memory"]),
        sum(in_bytes(volume["sizeLimit"]) for volume in volumes),
    )


COMPOSE = {str(path.relative_to(DEPLOY)): read_compose(path, NEEDED) for path in list_compose()}
OBJECTS = {
    str(path.relative_to(DEPLOY)): read_objects(path)
    for folder in ("kubernetes", "llm-d")
    for path in sorted((DEPLOY / folder).rglob("*.yaml"))
}
PODS = dict(iter_pods(OBJECTS))
SERVERS = {**dict(iter_compose(COMPOSE)), **PODS}


def test_no_server_under_deploy_is_missed():
    text = "".join(yaml.safe_dump(document) for document in COMPOSE.values())
    text += "".join(yaml.safe_dump_all(things) for things in OBJECTS.values())
    assert len(SERVERS) == len(re.findall(r"^ *- serve$", text, re.MULTILINE))


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_is_given_more_time_to_stop_than_it_takes(name: str):
    server = SERVERS[name]
    assert server.stop_s > server.needs_s


@pytest.mark.parametrize(
    ("words", "needs_s"),
    [
        ((), 60 + 30),
        (("--shutdown-timeout=0",), 60 + 30),
        (("--shutdown-timeout=10",), 10 + 30),
        (("--pd-deadline=2m", "--pd-lease=45s"), 120 + 45),
        (("--pd-deadline=5s",), MIN_SHUTDOWN_TIMEOUT_S + 30),
    ],
)
def test_what_a_server_takes_follows_its_flags(words: tuple[str, ...], needs_s: float):
    assert Given(words, stop_s=0).needs_s == needs_s
    assert Given(words, stop_s=0, before_s=75).needs_s == needs_s + 75


@pytest.mark.parametrize("name", PODS)
def test_the_kv_cache_and_all_volumes_in_memory_leave_room_below_the_limit(name: str):
    """The KV arena is a memory file without a name: it counts against the pod's limit, not /dev/shm's."""
    pod = PODS[name]
    kv_bytes = int(pod.value("--kv-cache-memory-bytes") or 0)
    assert bool(kv_bytes) is ("cpu.yaml" in name or name.startswith("llm-d"))
    assert kv_bytes + pod.in_memory_bytes + REST_BYTES <= pod.memory_bytes
