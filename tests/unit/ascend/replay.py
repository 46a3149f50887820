# SPDX-License-Identifier: Apache-2.0
"""Plays a recording back as a `System`. Form of a recording, line by line:

`# …` what it is; `= env NAME=VALUE`; `= tool NAME` (installed); `= devices 0 1` (/dev/davinci0 …); `= file PATH` and
`$ COMMAND`, followed by their text in lines that start with `| `; after a command `! exit N`, `! hangs` or `! busy N`
(busy for the first N calls). A command that is not in the recording is an error of the test, not of the tool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_ascend_pd.ascend.devices import CommandResult, System

RECORDINGS = Path(__file__).parent / "recordings"
BUSY = CommandResult(1, "hccn_tool is busy, please try again.\n")


@dataclass
class Answer:
    text: str = ""
    code: int = 0
    hangs: bool = False
    busy: int = 0


@dataclass
class Recording:
    environ: dict[str, str] = field(default_factory=dict)
    tools: list[str] = field(default_factory=list)
    devices: list[int] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def run(self, argv: Sequence[str], timeout_s: float) -> CommandResult:
        command = " ".join((Path(argv[0]).name, *argv[1:]))
        self.calls.append(command)
        answer = self.answers[command]
        if answer.hangs:
            raise TimeoutError
        if answer.busy > 0:
            answer.busy -= 1
            return BUSY
        return CommandResult(answer.code, answer.text)


def read_recording(name: str) -> Recording:
    """The recording in `recordings/<name>.txt`."""
    recording = Recording()
    answer, path = Answer(), ""
    for line in (RECORDINGS / f"{name}.txt").read_text().splitlines():
        kind, rest = line[:1], line[2:]
        if kind == "=":
            path = _read_setting(recording, rest)
        elif kind == "$":
            path, answer = "", Answer()
            recording.answers[rest] = answer
        elif kind == "!":
            word, _, value = rest.partition(" ")
            answer.code = int(value) if word == "exit" else answer.code
            answer.busy = int(value) if word == "busy" else answer.busy
            answer.hangs = word == "hangs"
        elif kind == "|" and path:
            recording.files[path] += rest + "\n"
        elif kind == "|":
            answer.text += rest + "\n"
        else:
            assert kind == "#", line
    return recording


def _read_setting(recording: Recording, rest: str) -> str:
    """The path when a file begins."""
    word, _, value = rest.partition(" ")
    if word == "env":
        name, _, text = value.partition("=")
        recording.environ[name] = text
    elif word == "tool":
        recording.tools.append(value)
    elif word == "devices":
        recording.devices = [int(number) for number in value.split()]
    else:
        assert word == "file", rest
        recording.files[value] = ""
        return value
    return ""


def build(recording: Recording, root: Path) -> System:
    """Lay the recording's files out under `root`; its clock jumps when somebody sleeps."""
    (root / "dev").mkdir(parents=True, exist_ok=True)
    for name in ("davinci_manager", "null", *(f"davinci{number}" for number in recording.devices)):
        (root / "dev" / name).touch()
    for tool in recording.tools:
        place = root / ("usr/local/bin" if tool == "npu-smi" else "usr/local/Ascend/driver/tools") / tool
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch(mode=0o755)
    for path, text in recording.files.items():
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return System(run=recording.run, root=root, environ=recording.environ, sleep=sleep, clock=lambda: now[0])


def replay(name: str, root: Path) -> System:
    """A recording by name as a machine under `root` (a test's `tmp_path`)."""
    return build(read_recording(name), root)
