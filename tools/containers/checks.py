# SPDX-License-Identifier: Apache-2.0
"""What `make container-test` tries on a built image: started as a container engine would start it, as its user.

Next in the reading order: `pair.py`, which serves a model from it.
"""

from __future__ import annotations

import http.server
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.cache import CacheError, staging
from tools.containers import roots
from tools.containers.images import Image
from tools.containers.roots import Bind, Run

TRIED: Final = ("source", "wheel-cpu", "wheel-ascend", "cpu", "a2", "a3")
# Of the Ascend targets. torch_npu's torch and triton-ascend are on indexes that are not reachable where this was made;
# vllm-ascend is compiled against CANN.
ASCEND_NOT_RUN: Final = ("/docker/requirements.sh /needs", "install-ascend.sh")
OTHER_UID: Final = "123456:0"
START_S: Final = 300.0


class CheckFailed(CacheError):
    """The image does not do what it should."""


@dataclass(frozen=True)
class Container:
    """Starts commands in an image."""

    image: Image

    def run(
        self, command: Sequence[str], *, user: str = "", binds: Sequence[Bind] = (), env: dict[str, str] | None = None
    ) -> Run:
        """As the image's user, with the image's environment; nothing of this machine's."""
        image = self.image
        variables = {**image.env, **(env or {})}
        return Run(command, image.layers, None, variables, binds, user or image.user, image.folder)

    def output(self, *command: str, user: str = "") -> str:
        """What it prints; a bad exit code is an error."""
        return roots.run(self.run(command, user=user), timeout_s=START_S).stdout

    def code(self, *command: str, env: dict[str, str] | None = None) -> int:
        """Its exit code."""
        return roots.run(self.run(command, env=env), check=False, timeout_s=START_S).returncode


def iter_checks(image: Image, release: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Title and function; the function returns what was seen, or raises CheckFailed."""
    inside = Container(image)
    entry = image.entrypoint
    yield "configuration: not root, entrypoint, health check, labels", lambda: check_configuration(image)
    yield "`vllm --version` as the image's user", lambda: expect(inside.output(*entry, "--version"), release)
    yield (
        "`vllm --version` as any other uid with group 0",
        lambda: expect(inside.output(*entry, "--version", user=OTHER_UID), release),
    )
    yield (
        "`vllm serve --help=all` has --pd-role",
        lambda: expect(inside.output(*entry, "serve", "--help=all"), "--pd-role"),
    )
    yield "`vllm pd doctor` runs", lambda: check_doctor(inside)
    yield "health check: 200, 503, nobody there", lambda: check_health(inside)
    yield "SIGTERM to process 1 while it starts", lambda: check_early_sigterm(image)
    yield "nothing writable but the home, nothing left behind", lambda: check_files(inside)


def check_configuration(image: Image) -> str:
    """What an orchestrator reads."""
    uid, _, gid = image.user.partition(":")
    if not uid.isdigit() or uid == "0" or gid != "0":
        raise CheckFailed(f"user is {image.user}")
    wrong = [name for name, value in image.labels.items() if not value]
    if image.entrypoint != ("vllm",) or image.health != ("healthcheck",) or wrong:
        raise CheckFailed(f"entrypoint {image.entrypoint}, health check {image.health}, empty labels {wrong}")
    return f"user {image.user}, entrypoint {' '.join(image.entrypoint)}"


def expect(text: str, *words: str) -> str:
    """The first line with the first word; all of them have to be there."""
    for word in words:
        if word not in text:
            raise CheckFailed(f"{word!r} is not in:\n{text[-3000:]}")
    return next(line.strip() for line in text.splitlines() if words[0] in line)[:100]


def check_doctor(inside: Container) -> str:
    """It reports; what it finds on a build machine does not matter."""
    done = roots.run(inside.run([*inside.image.entrypoint, "pd", "doctor"]), check=False, timeout_s=START_S)
    if "Traceback" in done.stdout or not done.stdout.strip():
        raise CheckFailed(f"exit code {done.returncode}:\n{done.stdout[-3000:]}")
    return f"exit code {done.returncode}, {len(done.stdout.splitlines())} lines"


def check_health(inside: Container) -> str:
    """The image's own command against a server of ours."""
    seen = []
    with serve_status() as (url, answer):
        for status in (200, 503):
            answer.append(status)
            seen.append(inside.code(*inside.image.health, env={"HEALTH_URL": url}))
    seen.append(inside.code(*inside.image.health, env={"HEALTH_URL": url}))
    if seen[0] != 0 or 0 in seen[1:]:
        raise CheckFailed(f"exit codes {seen}")
    return f"exit codes {seen}"


@contextmanager
def serve_status() -> Iterator[tuple[str, list[int]]]:
    """A URL of this machine that answers with the last status in the list."""
    answer = [500]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer[-1])
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/health", answer
    finally:
        server.shutdown()
        server.server_close()


def check_early_sigterm(image: Image) -> str:
    """Docker's stop, a second after its start: Python has no handler for it yet, so tini has to pass it on."""
    command = [*image.entrypoint, "serve", "/no/such/model"]
    with staging(roots.get_store() / "running") as scratch:
        log = scratch / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                Container(image).run(command).argv(scratch), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
            )
        try:
            first = find_first_process(process.pid)
            time.sleep(1.0)
            started = time.monotonic()
            first.send(signal.SIGTERM)
            code = process.wait(20)
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"still there 20 s after SIGTERM:\n{log.read_text()[-2000:]}") from None
        finally:
            roots.end(process)
    return f"ended {time.monotonic() - started:.1f} s later with {code}"


@dataclass(frozen=True)
class FirstProcess:
    """Process 1 of a PID namespace, by its number here."""

    pid: int

    def send(self, number: signal.Signals) -> None:
        """A signal from outside, as an engine sends it."""
        subprocess.run(["kill", f"-{number.value}", str(self.pid)], check=True)


def find_first_process(parent: int, timeout_s: float = 30.0) -> FirstProcess:
    """The child of `unshare --fork`, once the image's program has replaced the script that mounts."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        children = Path(f"/proc/{parent}/task/{parent}/children")
        pids = children.read_text().split() if children.exists() else []
        if pids and "tini" in Path(f"/proc/{pids[0]}/cmdline").read_text():
            return FirstProcess(int(pids[0]))
        time.sleep(0.05)
    raise CheckFailed("process 1 is not tini")


def check_files(inside: Container) -> str:
    """The installation belongs to root; apt's lists, pip's cache and the build's mounts are gone."""
    script = "; ".join(
        [
            "touch /home/vllm/x && echo home-writable",
            "find / -xdev -type d -writable -not -path '/proc/*' -not -path '/dev/*' 2>/dev/null | sort",
            "echo left:; ls -A /var/lib/apt/lists /docker /dist /site /cache 2>/dev/null; echo end",
        ]
    )
    text = inside.output("sh", "-c", script)
    writable = re.findall(r"^/.*$", text, re.MULTILINE)
    allowed = {"/home/vllm", "/tmp", "/var/tmp", "/run/lock", "/dev/shm"}
    left = text.partition("left:\n")[2].partition("end")[0].split()
    extra = [path for path in writable if path not in allowed and not path.endswith(":")]
    if "home-writable" not in text or extra or [one for one in left if not one.endswith(":")]:
        raise CheckFailed(f"writable: {extra}; left: {left}; output:\n{text[-1500:]}")
    return f"writable: {' '.join(sorted(set(writable) & allowed))}"
