# SPDX-License-Identifier: Apache-2.0
"""Reads what lies under `deploy/`: compose files as compose reads them, Kubernetes objects, and the `vllm serve`
commands of both. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from tools.cache import CacheError

DEPLOY: Final = Path(__file__).resolve().parents[2] / "deploy"
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?:(:?[-?])([^}]*))?\}|\$(\w+)")


class ManifestError(CacheError):
    """A file under `deploy/` is not what it should be."""


@dataclass(frozen=True)
class ServeCommand:
    """One `vllm serve` that a manifest starts."""

    where: str
    arguments: tuple[str, ...]  # after `serve`
    environment: Mapping[str, str] = field(default_factory=dict)

    def value(self, flag: str) -> str | None:
        """Of `--flag=value`; None where the flag is not given so."""
        found = [one.partition("=")[2] for one in self.arguments if one.startswith(f"{flag}=")]
        return found[-1] if found else None


def interpolate(text: str, environment: Mapping[str, str]) -> str:
    """`$A`, `${A}`, `${A:-default}` and `${A:?message}` as compose puts them in; `$$` is a dollar sign.

    Raises:
        ManifestError: a variable without a default is not set.
    """

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match[1] or match[4], match[2] or "", match[3] or ""
        given = environment.get(name)
        if given or (given is not None and not operator.startswith(":")):
            return given
        if operator.endswith("-"):
            return rest
        raise ManifestError(f"{name} is not set: {rest or 'it has no default'}")

    return "$".join(_VARIABLE.sub(value, part) for part in text.split("$$"))


def read_compose(path: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """A compose file with its YAML merges made and its variables put into every string."""

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fill(one) for key, one in value.items()}
        if isinstance(value, list):
            return [fill(one) for one in value]
        return interpolate(value, environment) if isinstance(value, str) else value

    document: dict[str, Any] = fill(yaml.safe_load(path.read_text()))
    return document


def list_compose() -> list[Path]:
    """Every compose file."""
    return [*sorted((DEPLOY / "compose").glob("*.yaml")), DEPLOY / "vllm-router/compose.yaml"]


def list_kubernetes() -> list[Path]:
    """Every file of Kubernetes objects."""
    return [*sorted((DEPLOY / "kubernetes").glob("*.yaml")), *sorted((DEPLOY / "llm-d").glob("*.yaml"))]


def read_objects(path: Path) -> list[dict[str, Any]]:
    """The objects of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def get_pod_template(thing: Mapping[str, Any]) -> dict[str, Any] | None:
    """The pod template of a LeaderWorkerSet or a Deployment; None of anything else."""
    template: dict[str, Any] | None = None
    if thing["kind"] == "LeaderWorkerSet":
        template = thing["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    elif thing["kind"] == "Deployment":
        template = thing["spec"]["template"]
    return template


def iter_serve_commands(environment: Mapping[str, str]) -> Iterator[ServeCommand]:
    """Every `vllm serve` of every manifest; `environment` fills compose's variables."""
    for path in list_compose():
        for name, service in read_compose(path, environment)["services"].items():
            if service["command"][0] == "serve":
                variables = service.get("environment", {})
                yield ServeCommand(f"{path.relative_to(DEPLOY)} {name}", tuple(service["command"][1:]), variables)
    for path in list_kubernetes():
        for thing in read_objects(path):
            template = get_pod_template(thing)
            for container in template["spec"]["containers"] if template else ():
                if container["args"][0] == "serve":
                    where = f"{path.relative_to(DEPLOY)} {thing['metadata']['name']}"
                    yield ServeCommand(where, tuple(container["args"][1:]))
