# SPDX-License-Identifier: Apache-2.0
"""What the pages of the repository show: commands, quoted log lines, links, names; taken apart, and looked up.

`tests/unit/tools/test_guides.py` asks for the problems. Commands are parsed by the parsers that would parse them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.reference.endpoints import find_endpoints
from tools.reference.environment import find_variables
from tools.reference.metrics import find_metrics
from tools.reference.sources import HOLE, ROOT, module_paths, parse, templates
from vllm_ascend_pd.front.flags import OPTIONS
from vllm_ascend_pd.up.cli import build_parser

SHELLS: Final = ("sh", "bash", "console", "")
_FENCE: Final = re.compile(r"^(\s*)```([a-z]*)\s*$")
_ENDS: Final = {"|", "||", "&&", "&", ";", ">", ">>", "2>&1", "<", "\\"}
_LINK: Final = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)|\!\[[^\]]*\]\(([^)\s]+)\)")
_MIN_FRAGMENT: Final = 4
# Named as missing.
_PLANNED: Final = frozenset({"/pd/drain"})


@dataclass(frozen=True)
class Block:
    """Fenced or indented text; `line` is that of its first line."""

    file: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """For a message."""
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def list_files() -> list[Path]:
    """The pages in the root, and everything under `docs/` and `deploy/`."""
    folders = (ROOT / "docs", ROOT / "deploy")
    return [*sorted(ROOT.glob("*.md")), *(path for folder in folders for path in sorted(folder.rglob("*.md")))]


def find_blocks(file: Path) -> Iterator[Block]:
    """Fenced blocks, and blocks indented by four blanks after an empty line."""
    lines = file.read_text().splitlines()
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        start = at
        if fence:
            at += 1
            while at < len(lines) and lines[at].strip() != "```":
                at += 1
            yield Block(file, start + 2, fence[2], "\n".join(lines[start + 1 : at]))
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            while at < len(lines) and lines[at].startswith("    "):
                at += 1
            yield Block(file, start + 1, "", "\n".join(line[4:] for line in lines[start:at]))
        at += 1


def find_commands(block: Block) -> Iterator[tuple[dict[str, str], list[str]]]:
    """(variables set for it, words) of each simple command in a block for the shell."""
    for line in block.text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a drawing, or a document inside the shell
            continue
        while words:
            ends = [place for place, word in enumerate(words) if word in _ENDS]
            end = ends[0] if ends else len(words)
            yield from _simple(words[:end])
            words = words[end + 1 :]


def _simple(words: list[str]) -> Iterator[tuple[dict[str, str], list[str]]]:
    variables: dict[str, str] = {}
    while words and (set_here := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0])):
        variables[set_here[1]] = set_here[2]
        words = words[1:]
    if words and words[0] == "$":
        words = words[1:]
    if words:
        yield variables, words


# ---------------------------------------------------------------- names


def find_unknown_names(file: Path) -> list[str]:
    """Flags, variables, metrics, endpoints and verbs of ours that a page names and that do not exist."""
    text = file.read_text()
    metrics = {metric.name for metric in find_metrics()}
    verbs = {action for action in build_parser()._subparsers._group_actions[0].choices}  # type: ignore[union-attr]
    known: list[tuple[str, set[str]]] = [
        (r"--(?:no-)?pd-[a-z][a-z-]*[a-z]", {f"--{no}pd-{option.word}" for option in OPTIONS for no in ("", "no-")}),
        (r"VLLM_PD_[A-Z][A-Z_]*[A-Z]", {option.variable for option in OPTIONS} | set(find_variables())),
        (
            r"vllm:pd_[a-z_]*[a-z]",
            {f"{name}{end}" for name in metrics for end in ("", "_total", "_bucket", "_sum", "_count")},
        ),
        (r"(?<![\w.])/pd/[a-z]+(?!/)", {endpoint.path for endpoint in find_endpoints()}),
        (r"(?<=`)vllm pd [a-z]+", {f"vllm pd {verb}" for verb in verbs}),
    ]
    found = []
    for pattern, names in known:
        for name in dict.fromkeys(re.findall(pattern, text)):
            if name not in names | _PLANNED:
                found.append(f"{file.relative_to(ROOT)}: {name} does not exist")
    return found


# ---------------------------------------------------------------- links


def anchors(file: Path) -> set[str]:
    """What headings can be linked to."""
    found: set[str] = set()
    fenced = False
    for line in file.read_text().splitlines():
        fenced ^= bool(line.strip().startswith("```"))
        heading = re.match(r"#{1,6}\s+(.*?)\s*$", line)
        if heading and not fenced:
            slug = re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-")
            while slug in found:
                slug += "-1"
            found.add(slug)
    return found


def find_broken_links(file: Path) -> list[str]:
    """Links to files that are not there, or to headings that they do not have."""
    found = []
    for match in _LINK.finditer(file.read_text()):
        target = match[1] or match[2]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (file.parent / path).resolve() if path else file
        if not other.exists():
            found.append(f"{file.relative_to(ROOT)}: {target}: there is no such file")
        elif anchor and other.suffix == ".md" and anchor not in anchors(other):
            found.append(f"{file.relative_to(ROOT)}: {target}: no such heading")
    return found


# ---------------------------------------------------------------- log lines


def find_unprinted_lines(block: Block, printed: list[str]) -> list[str]:
    """Lines of a `log` block that no template of the code prints; `…` stands for anything."""
    found = []
    for line in filter(None, (line.strip() for line in block.text.splitlines())):
        for fragment in re.split(r"\s*…\s*", line):
            if len(fragment) >= _MIN_FRAGMENT and not any(fragment in text for text in printed):
                found.append(f"{block.where}: nothing prints {fragment!r}")
    return found


def find_printed() -> list[str]:
    """The templates of all strings in the package, and in the edits; `%s` and braces are holes that match nothing."""
    edits = sorted((ROOT / "vllm").rglob("*.py"))
    texts = (text for path in [*module_paths(), *edits] for text in templates(parse(path)))
    return list(dict.fromkeys(re.sub(r"%(\(\w+\))?[-#0-9.]*[sdrfgx]", HOLE, text) for text in texts))
