# SPDX-License-Identifier: Apache-2.0
"""Carries out a stage of the Dockerfile in layers under a hash, as an image build does.

A layer is found again while nothing that goes into it has changed: the layers below, the instruction, its variables,
and the files that it sees. `Site` is what this machine needs and an image build elsewhere does not.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tools.cache import CacheError, compute_digest, compute_tree_digest, staging
from tools.containers import context, roots
from tools.containers.dockerfile import DockerfileError, Instruction, Stage, substitute
from tools.containers.roots import Bind, Run
from tools.installer import find_local_torch, get_find_links

ROOT: Final = Path(__file__).resolve().parents[2]
KEPT_LAYERS: Final = 20  # two targets have 15
CERTIFICATES: Final = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")


@dataclass(frozen=True)
class Site:
    """This machine's certificates and local wheels, bound into every RUN; nothing of it stays in a layer."""

    env: Mapping[str, str] = field(default_factory=dict)
    binds: tuple[Bind, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)  # of the build

    @staticmethod
    def of_this_machine() -> Site:
        """From the environment and pip's configuration."""
        env: dict[str, str] = {}
        binds: list[Bind] = []
        arguments: dict[str, str] = {}
        given = [os.environ[name] for name in CERTIFICATES if os.environ.get(name)]
        if given and Path(given[0]).is_file():
            binds.append(Bind(Path(given[0]), "/site/certificates.pem"))
            env |= dict.fromkeys(CERTIFICATES, "/site/certificates.pem")
        places = [place.removeprefix("file://") for place in get_find_links()]
        torch = find_local_torch(places)
        if torch is not None:
            binds.append(Bind(torch.parent, "/site/wheels"))
            env["PIP_FIND_LINKS"] = "/site/wheels"
            arguments["PYTORCH_INDEX"] = ""
        return Site(env, tuple(binds), arguments)


@dataclass(frozen=True)
class Image:
    """Layers and configuration, as far as they are built."""

    layers: tuple[Path, ...]
    key: str
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    health: tuple[str, ...] = ()
    stop_signal: str = "SIGTERM"


@dataclass
class Builder:
    """Builds stages of one Dockerfile, each once. `skipped` collects RUN steps that were left out, by their text."""

    stages: Mapping[str, Stage]
    site: Site
    arguments: Mapping[str, str] = field(default_factory=dict)
    bases: Mapping[str, Image] = field(default_factory=dict)  # in place of images that cannot be pulled here
    skip: tuple[str, ...] = ()  # RUN steps that contain one of these
    executed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    timings: list[tuple[str, float]] = field(default_factory=list)
    built: dict[str, Image] = field(default_factory=dict)

    def build(self, name: str) -> Image:
        """The image of a stage.

        Raises:
            CacheError: a step failed.
        """
        if name in self.built:
            return self.built[name]
        stage = self.stages.get(name)
        if stage is None:
            if name not in self.bases:
                raise DockerfileError(f"no stage and no base {name!r}")
            return self.bases[name]
        image = replace(self.build(stage.base), arguments={})
        for one in stage.instructions:
            image = self._step(image, one)
        self.built[name] = image
        return image

    def _step(self, image: Image, one: Instruction) -> Image:
        values = {**image.arguments, **image.env}
        if one.keyword == "ARG":
            given = {**self.arguments, **self.site.arguments}
            known = {name: given.get(name, value) for name, value in one.pairs.items()}
            return replace(image, arguments={**image.arguments, **known})
        if one.keyword == "RUN":
            return self._run(image, one)
        if one.keyword == "COPY":
            return self._copy(image, one)
        text = substitute(one.text, values)
        shown = replace(one, text=text)
        if one.keyword == "ENV":
            return replace(image, env={**image.env, **shown.pairs})
        if one.keyword == "LABEL":
            return replace(image, labels={**image.labels, **shown.pairs})
        if one.keyword == "WORKDIR":
            return self._workdir(replace(image, folder=text))
        if one.keyword == "HEALTHCHECK":
            return replace(image, health=tuple(replace(one, text=text.removeprefix("CMD ")).words))
        simple = {"USER": "user", "STOPSIGNAL": "stop_signal"}
        if one.keyword in simple:
            return replace(image, **{simple[one.keyword]: text})  # type: ignore[arg-type]
        lists = {"ENTRYPOINT": "entrypoint", "CMD": "command"}
        if one.keyword in lists:
            return replace(image, **{lists[one.keyword]: tuple(shown.words)})  # type: ignore[arg-type]
        return image  # EXPOSE documents

    def _workdir(self, image: Image) -> Image:
        place = image.folder.strip("/")
        if any((layer / place).is_dir() for layer in image.layers):
            return image  # it keeps its owner and mode

        def fill(upper: Path) -> None:
            (upper / place).mkdir(parents=True)

        return _publish(image, compute_digest(image.key, "WORKDIR", image.folder), fill)

    def _copy(self, image: Image, one: Instruction) -> Image:
        if one.words != [".", "."]:
            raise DockerfileError(f"line {one.line}: only COPY . . is known here, not {one.text}")
        key = compute_digest(image.key, "COPY", image.folder, context.compute_context_digest(ROOT))

        def fill(upper: Path) -> None:
            context.copy_context(ROOT, upper / image.folder.strip("/"))

        return _publish(image, key, fill)

    def _run(self, image: Image, one: Instruction) -> Image:
        if any(word in one.text for word in self.skip):
            self.skipped.append(one.text)
            return image
        binds: list[Bind] = []
        seen: list[str] = []
        for mount in one.mounts:
            kind, target = mount.get("type", "bind"), mount["target"]
            if kind == "cache":
                folder = roots.get_store() / "mounts" / target.strip("/").replace("/", "-")
                folder.mkdir(parents=True, exist_ok=True)
                binds.append(Bind(folder, target, writable=True))
            elif "from" in mount:
                source = self._find(self.build(mount["from"]), mount["source"])
                seen.append(compute_tree_digest(source, ["."]))
                binds.append(Bind(source, target))
            else:
                seen.append(context.compute_context_digest(ROOT, mount["source"]))
                binds.append(Bind(ROOT / mount["source"], target))
        env = {**image.arguments, **image.env}
        key = compute_digest(image.key, "RUN", one.text, json.dumps(env, sort_keys=True), *seen)
        return self._layer(image, one.text, binds, env, key)

    def _find(self, image: Image, path: str) -> Path:
        for layer in reversed(image.layers):
            if (layer / path.strip("/")).exists():
                return layer / path.strip("/")
        raise CacheError(f"{path} is not in the image that it is taken from")

    def _layer(self, image: Image, text: str, binds: list[Bind], env: Mapping[str, str], key: str) -> Image:
        started = time.monotonic()
        everything = [*binds, *self.site.binds]

        def fill(upper: Path) -> None:
            print(f"[containers] {text}", flush=True)
            inside = {"HOME": "/root", **env, **self.site.env}
            roots.run(Run(["sh", "-c", text], image.layers, upper, inside, everything, folder=image.folder))
            _remove_mount_points(upper, [bind.target for bind in everything])

        built = _publish(image, key, fill)
        self.executed.append(text)
        self.timings.append((text, time.monotonic() - started))
        return built


def _publish(image: Image, key: str, fill: Callable[[Path], None]) -> Image:
    final = roots.get_store() / "layers" / key
    if not (final / "layer.json").exists():
        shutil.rmtree(final, ignore_errors=True)
        with staging(final.parent) as folder:
            (folder / "files").mkdir()
            fill(folder / "files")
            (folder / "layer.json").write_text(json.dumps({"key": key}))
            folder.rename(final)
            folder.mkdir()
    os.utime(final / "layer.json")
    return replace(image, layers=(*image.layers, final / "files"), key=key)


def prune_layers(keep: int = KEPT_LAYERS) -> None:
    """Each change of a source makes new ones: keep those that were used last."""
    stamps = sorted((roots.get_store() / "layers").glob("*/layer.json"), key=lambda path: path.stat().st_mtime)
    for stamp in stamps[:-keep]:
        shutil.rmtree(stamp.parent, ignore_errors=True)


def _remove_mount_points(upper: Path, targets: list[str]) -> None:
    """The empty folders and files that something was mounted on are no part of a layer."""
    for target in targets:
        place = upper / target.strip("/")
        try:
            place.rmdir() if place.is_dir() else place.unlink(missing_ok=True)
            place.parent.rmdir()
        except OSError:
            pass
    shutil.rmtree(upper / "dev", ignore_errors=True)
