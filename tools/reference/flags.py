# SPDX-License-Identifier: Apache-2.0
"""`flags.md`: the `--pd-*` flags of `vllm serve`, from `front/flags.py` and the defaults of `PDConfig`."""

from __future__ import annotations

import dataclasses
import re

from tools.reference.markdown import code, codes, page, table
from vllm_ascend_pd.config import PDConfig
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.front.flags import OPTIONS, PDOption

_DURATION_FIELDS = re.compile(r".*_s")
_RANGE = re.compile(r"outside (\S+) to (\S+)")


def default_of(option: PDOption) -> str:
    """As the configuration has it, with its unit."""
    if option.word == "role":
        return "none: aggregated serving"
    if option.kind == "switch":
        return "off"
    fields = {field.name: field.default for field in dataclasses.fields(PDConfig)}
    default = fields.get(option.field, dataclasses.MISSING)
    if default is dataclasses.MISSING or default in ("", ()):
        return "see text"
    if _DURATION_FIELDS.fullmatch(option.field):
        return f"{default:g} s"
    return code(default)


def values_of(option: PDOption) -> str:
    """Choices, or what is written, with the range of a duration."""
    if option.choices:
        return codes(option.choices)
    if option.kind == "switch":
        return f"switch ({code('--no-pd-' + option.word)} turns it off)"
    text = code(f"{option.metavar}…" if option.kind == "list" else option.metavar)
    if option.metavar == "TIME":
        try:
            option.parse("0.000001", option.flag)
        except PDConfigError as error:
            found = _RANGE.search(str(error))
            text += f", {found[1]} to {found[2]}" if found else ""
    return text


def render() -> str:
    """The page."""
    rows = [
        (
            code(option.flag),
            values_of(option),
            default_of(option),
            option.only.value if option.only is not None else "both",
            code(option.variable),
            option.help,
        )
        for option in OPTIONS
    ]
    return page(
        "Flags of `vllm serve`",
        "The flag wins over its variable. An empty variable counts as not given. A wrong value, a flag of the other "
        "role, or a `VLLM_PD_…` variable that does not exist stops `vllm serve` with status 2 and a sentence "
        "that names "
        "it. Durations: `30`, `30s`, `500ms`, `2m`. The role column says where a flag is accepted.",
        table(("flag", "values", "default", "role", "variable", "what it does"), rows),
        "Everything else of `vllm serve` works as without `--pd-role`, but for what is refused by name: see "
        "[errors](errors.md#refused-at-start).",
    )
