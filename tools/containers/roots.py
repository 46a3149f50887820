# SPDX-License-Identifier: Apache-2.0
"""Clean roots without a container engine: a base by debootstrap, layers by overlayfs, processes by chroot.

Everything that is mounted is mounted in a mount namespace of the process that runs inside, so nothing is left when it
ends, however it ends. Needs root, Linux with overlayfs, and Debian's or Ubuntu's package tools.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tools.cache import CacheError, compute_digest, get_cache_root, publish, staging

SUITE: Final = "bookworm"  # of debian:bookworm-slim; minbase is what that image holds, less its documentation
MIRROR: Final = "http://deb.debian.org/debian"
RECIPE: Final = "1"  # raise it when a base or a layer is made differently
DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def get_store() -> Path:
    """Where bases and layers are kept."""
    return get_cache_root() / "containers"


@dataclass(frozen=True)
class Bind:
    """Something of this machine that is seen inside at `target`."""

    source: Path
    target: str
    writable: bool = False


@dataclass(frozen=True)
class Run:
    """One command inside a root, as a container engine would start it."""

    command: Sequence[str]
    layers: Sequence[Path]  # lowest first
    upper: Path | None = None  # None: what is written is lost
    env: Mapping[str, str] = field(default_factory=dict)
    binds: Sequence[Bind] = ()
    user: str = "0:0"
    folder: str = "/"
    network: str = ""  # a network namespace of `ip netns`; "": this machine's

    def argv(self, scratch: Path) -> list[str]:
        """The whole command line; `scratch` is an empty folder on the same file system as `upper`."""
        enter = ["ip", "netns", "exec", self.network] if self.network else []
        namespaces = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        return [*enter, *namespaces, "--propagation", "private", "sh", "-euc", self._script(scratch)]

    def _script(self, scratch: Path) -> str:
        root, quote = scratch / "root", shlex.quote
        upper = self.upper or scratch / "upper"
        lower = ":".join(str(layer) for layer in reversed(self.layers))
        lines = [
            f"mkdir -p {quote(str(root))} {quote(str(scratch / 'work'))} {quote(str(upper))}",
            f"mount -t overlay overlay -o lowerdir={lower},upperdir={upper},workdir={scratch / 'work'} {root}",
            f"cd {root}",
            "mount -t proc proc proc",
            "mount --bind /sys sys",
            "mount -o remount,bind,ro sys",
            "mount -t tmpfs -o mode=755 tmpfs dev",
            f"for name in {' '.join(DEVICES)}; do : >dev/$name; mount --bind /dev/$name dev/$name; done",
            "mkdir dev/shm dev/pts",
            "mount -t tmpfs -o mode=1777 tmpfs dev/shm",
            "ln -s /proc/self/fd dev/fd",
            "for name in resolv.conf hosts; do : >>etc/$name; mount --bind /etc/$name etc/$name; done",
        ]
        for bind in self.binds:
            target, source = quote(bind.target.lstrip("/")), quote(str(bind.source))
            if bind.source.is_dir():
                lines.append(f"mkdir -p {target}")
            else:
                lines.append(f"mkdir -p $(dirname {target}); [ -e {target} ] || : >{target}")
            lines.append(f"mount --bind {source} {target}")
            if not bind.writable:
                lines.append(f"mount -o remount,bind,ro {target}")
        env = [quote(f"{name}={value}") for name, value in {"PATH": PATH, **self.env}.items()]
        inside = f"cd {quote(self.folder)} && exec {shlex.join(self.command)}"
        lines.append(
            f"exec chroot --userspec={quote(self.user)} --groups= . env -i {' '.join(env)} sh -c {quote(inside)}"
        )
        return "\n".join(lines)


def run(what: Run, *, check: bool = True, timeout_s: float = 3600) -> subprocess.CompletedProcess[str]:
    """Run it to its end; output is returned, and part of the error when `check` finds a bad exit code.

    Raises:
        CacheError: it failed.
    """
    with staging(get_store() / "running") as scratch:
        done = subprocess.run(
            what.argv(scratch),
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    if check and done.returncode != 0:
        raise CacheError(f"{shlex.join(what.command)} ended with {done.returncode}:\n{done.stdout[-6000:]}")
    return done


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a container and all that is in it. `--kill-child` does not: the child changes its user, and with that the
    kernel forgets whose death it wanted to follow (prctl(2), PR_SET_PDEATHSIG)."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for pid in children.read_text().split() if children.exists() else []:
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)  # process 1 of its PID namespace: the others end with it
    process.kill()
    process.wait()


def require_machine() -> None:
    """Say what is missing before anything is started.

    Raises:
        CacheError: this machine cannot do it.
    """
    missing = [name for name in ("unshare", "chroot", "mount", "apt-get") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        reason = f"it lacks {', '.join(missing)}" if missing else "this is not root"
        raise CacheError(f"container-test needs root on Debian or Ubuntu (chroot, overlayfs); {reason}")


def get_base() -> Path:
    """Debian's minimal root, from the cache or made now."""
    final = get_store() / f"base-{compute_digest(RECIPE, SUITE, MIRROR)[:16]}"
    if not (final / "etc/debian_version").exists():
        with staging(get_store()) as folder:
            environment, program = _find_debootstrap(folder)
            root = folder / "root"
            command = [program, "--variant=minbase", SUITE, str(root), MIRROR]
            done = _capture(command, folder, {**os.environ, **environment})
            if done.returncode != 0:
                raise CacheError(f"debootstrap ended with {done.returncode}:\n{done.stdout[-3000:]}")
            shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
            publish(root, final)
    return final


def _find_debootstrap(folder: Path) -> tuple[dict[str, str], str]:
    """Its environment and the program; unpacked from Debian's package where it is not installed."""
    installed = shutil.which("debootstrap")
    if installed is not None:
        return {}, installed
    done = _capture(["apt-get", "download", "debootstrap"], folder, dict(os.environ))
    packages = list(folder.glob("debootstrap*.deb"))
    if done.returncode != 0 or not packages:
        raise CacheError(f"apt-get could not download debootstrap (apt-get update first?):\n{done.stdout.strip()}")
    subprocess.run(["dpkg-deb", "-x", str(packages[0]), str(folder / "tool")], check=True)
    share = folder / "tool/usr/share/debootstrap"
    return {"DEBOOTSTRAP_DIR": str(share)}, str(folder / "tool/usr/sbin/debootstrap")


def _capture(command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
