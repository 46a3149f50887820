# SPDX-License-Identifier: Apache-2.0
"""The machine as discovery sees it: commands, files under a root, environment, a clock. Replaced whole in tests.

No shell ever: a command is a list of words. Commands end by their timeout even when the driver hangs, because a
process in uninterruptible sleep cannot be waited for. The calling thread waits; nothing else runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from vllm_ascend_pd.ascend.devices.errors import CommandError, DeviceError, ToolMissingError

COMMAND_TIMEOUT_S: Final = 10.0
BUSY_TIMEOUT_S: Final = 30.0  # hccn_tool refuses to run twice at once; all ranks of a host ask at the same time
BUSY_PAUSE_S: Final = 0.25
MAX_OUTPUT_BYTES: Final = 1 << 20
MAX_FILE_BYTES: Final = 1 << 20
_KILL_WAIT_S: Final = 1.0

# Where the driver's installer puts them; looked at after PATH.
_TOOL_PLACES: Final = {
    "npu-smi": ("usr/local/bin/npu-smi", "usr/local/sbin/npu-smi", "usr/local/Ascend/driver/tools/npu-smi"),
    "hccn_tool": ("usr/local/Ascend/driver/tools/hccn_tool",),
}
_MOUNT_HINTS: Final = {
    "npu-smi": "mount /usr/local/bin/npu-smi, /usr/local/dcmi and /usr/local/Ascend/driver from the host",
    "hccn_tool": "mount /usr/local/Ascend/driver/tools/hccn_tool from the host (and /etc/hccn.conf)",
}


@dataclass(frozen=True)
class CommandResult:
    """Exit code and everything printed, stderr included."""

    code: int
    text: str


Runner = Callable[[Sequence[str], float], CommandResult]


def run_command(argv: Sequence[str], timeout_s: float) -> CommandResult:
    """Run one program without a shell and without input.

    Raises:
        TimeoutError: it did not end; it has been killed, and is left alone if even that does not end it.
        OSError: it cannot be started.
    """
    environ = {**os.environ, "LC_ALL": "C"}
    process = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environ,
        start_new_session=True,  # so that its children end with it
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill_group(process)
        raise TimeoutError(f"not ended after {timeout_s:g} s") from None
    except BaseException:
        _kill_group(process)
        raise
    return CommandResult(process.returncode, output[:MAX_OUTPUT_BYTES].decode("utf-8", "replace"))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    try:
        process.communicate(timeout=_KILL_WAIT_S)
    except (subprocess.TimeoutExpired, ValueError, OSError):
        pass  # it hangs in the driver: nobody can wait for it


@dataclass(frozen=True)
class System:
    """Everything that discovery touches.

    `run`, `root`, `environ`, `sleep` and `clock` are the real ones by default.
    """

    run: Runner = run_command
    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    timeout_s: float = COMMAND_TIMEOUT_S

    def find_tool(self, name: str) -> str | None:
        """The path of `npu-smi` or `hccn_tool`, or None."""
        searched = [Path(part) / name for part in self.environ.get("PATH", "").split(os.pathsep) if part]
        for candidate in (*searched, *(Path("/") / place for place in _TOOL_PLACES.get(name, ()))):
            there = self.place(candidate)
            if there.is_file() and os.access(there, os.X_OK):
                return str(there)
        return None

    def place(self, path: Path | str) -> Path:
        """`path` under this system's root."""
        return self.root / str(path).lstrip("/")

    def read_text(self, path: str) -> str | None:
        """The first MiB of a file; None when there is none.

        Raises:
            DeviceError: it is there and cannot be read.
        """
        try:
            with open(self.place(path), "rb") as file:
                return file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DeviceError(f"{path}: cannot be read: {error.strerror}; let this user read it") from error

    def names_in(self, directory: str) -> list[str]:
        """Names of the entries; none when the directory is not there."""
        try:
            return sorted(os.listdir(self.place(directory)))
        except OSError:
            return []

    def call(self, tool: str, *arguments: str) -> CommandResult:
        """Run a tool, and again while it says that it is busy.

        Raises:
            ToolMissingError: it is not here.
            CommandError: it cannot be started, did not end in time, or stayed busy.
        """
        path = self.find_tool(tool)
        words = " ".join((tool, *arguments))
        if path is None:
            raise ToolMissingError(f"{tool} is not here; {_MOUNT_HINTS.get(tool, 'install it')}")
        deadline = self.clock() + BUSY_TIMEOUT_S
        while True:
            try:
                result = self.run((path, *arguments), self.timeout_s)
            except TimeoutError:
                raise CommandError(
                    f"`{words}` did not end within {self.timeout_s:g} s; the driver or the device may hang: run it by "
                    "hand, look at `dmesg`, and reset the device or restart the host"
                ) from None
            except OSError as error:
                raise CommandError(f"`{words}` cannot be started: {error.strerror or error}") from error
            if "is busy" not in result.text or self.clock() >= deadline:
                break
            self.sleep(BUSY_PAUSE_S)
        if "is busy" in result.text:
            raise CommandError(
                f"`{words}` has been busy for {BUSY_TIMEOUT_S:g} s; another program calls {tool} all the time: stop it"
            )
        return result
