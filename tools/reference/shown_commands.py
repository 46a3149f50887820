# SPDX-License-Identifier: Apache-2.0
"""Commands that a guide shows, parsed as they would be when somebody pastes them."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from typing import Final

from tools.reference.commands import load_parser
from tools.reference.sources import ROOT
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.front.flags import add_pd_arguments, read_options
from vllm_ascend_pd.up.cli import build_parser, split_serve_args
from vllm_ascend_pd.up.plan import UpOptions, list_roles

# Flags of vLLM's own that the guides use. A test looks them up in the vLLM that is installed.
VLLM_FLAGS: Final = frozenset(
    {
        "--additional-config",
        "--api-key",
        "--block-size",
        "--compilation-config",
        "--dtype",
        "--enable-expert-parallel",
        "--enforce-eager",
        "--gpu-memory-utilization",
        "--headless",
        "--host",
        "--kv-cache-memory-bytes",
        "--kv-transfer-config",
        "--master-addr",
        "--master-port",
        "--max-model-len",
        "--max-num-batched-tokens",
        "--max-num-seqs",
        "--nnodes",
        "--no-enable-prefix-caching",
        "--node-rank",
        "--port",
        "--quantization",
        "--seed",
        "--served-model-name",
        "--shutdown-timeout",
        "--tensor-parallel-size",
        "--trust-remote-code",
    }
)


def check_command(variables: Mapping[str, str], words: Sequence[str]) -> str:
    """What is wrong with one command; empty when nothing is, or when it is not one of ours."""
    if words[:2] == ["vllm", "serve"]:
        return check_serve(words[2:], variables)
    if words[:2] == ["vllm", "pd"]:
        return check_pd(words[2:])
    if words[0] == "make":
        return check_make(words[1:])
    if words[:2] == ["python", "-m"] and words[2].startswith(("tools", "vllm_ascend_pd")):
        return "" if importlib.util.find_spec(words[2]) else f"there is no module {words[2]}"
    return ""


def check_serve(words: Sequence[str], variables: Mapping[str, str]) -> str:
    """Our flags by their parser and validation, vLLM's by name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("model", nargs="?")
    add_pd_arguments(parser)
    words = [word for word in words if word != "..."]
    unknown: list[str] = []

    def parse() -> None:
        parsed, rest = parser.parse_known_args(words)
        unknown.extend(rest)
        read_options(parsed, variables)

    return _refusal(parse) or check_vllm_flags(unknown)


def check_vllm_flags(words: Sequence[str]) -> str:
    """The first flag that vLLM is not known to have."""
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("-") and not re.fullmatch(r"-?\d+", flag) and flag not in VLLM_FLAGS:
            return f"{flag} is not a flag that the guides are known to use (tools/reference/shown_commands.py)"
    return ""


def check_pd(words: Sequence[str]) -> str:
    """A verb by its own parser; what follows `--` as arguments of `vllm serve`."""
    own = load_parser(words[0]) if words else None
    if own is not None:
        parser = own
        return _refusal(lambda: parser.parse_args(words[1:]))
    ours, serve_args = split_serve_args(words)

    def parse() -> None:
        parsed = build_parser().parse_args(ours)
        if parsed.verb == "up":
            list_roles(UpOptions(parsed.model, parsed.prefill, parsed.decode, serve_args=serve_args))

    return _refusal(parse) or check_serve(serve_args, {})


def check_make(words: Sequence[str]) -> str:
    """Every target is in the Makefile."""
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = [word for word in words if "=" not in word and word not in targets]
    return f"make has no target {missing[0]}" if missing else ""


def _refusal(parse: object) -> str:
    assert callable(parse)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            parse()
    except PDConfigError as error:
        return str(error)
    except SystemExit as ended:
        if ended.code == 0:  # --help
            return ""
        return said.getvalue().strip().splitlines()[-1]
    return ""
