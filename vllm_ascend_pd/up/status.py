# SPDX-License-Identifier: Apache-2.0
"""`vllm pd status URL`: fetch `/pd/status` of one instance and show it as tables.

Shows whatever the instance says, so that a newer server's fields appear without a change here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_ascend_pd.errors import PDUnreachableError

TIMEOUT_S = 10.0


def fetch_status(url: str) -> dict[str, Any]:
    """The JSON object that `/pd/status` of the instance at `url` answers.

    Raises:
        PDUnreachableError: nothing answers there, or what answers is no instance with a PD role.
    """
    where = f"{url.rstrip('/')}/pd/status"
    try:
        with httpx.Client(trust_env=False, timeout=TIMEOUT_S) as client:
            answer = client.get(where)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PDUnreachableError(
            f"{where} does not answer ({error}); check that it runs and that the address is right"
        ) from error
    if answer.status_code == 404:
        raise PDUnreachableError(f"{where} is not there: the server at {url} was started without --pd-role")
    if answer.status_code != 200:
        raise PDUnreachableError(f"{where} answers {answer.status_code}: {answer.text[:200]}")
    try:
        status = answer.json()
    except ValueError as error:
        raise PDUnreachableError(f"{where} does not answer JSON") from error
    if not isinstance(status, dict):
        raise PDUnreachableError(f"{where} answers a {type(status).__name__}, not an object")
    return status


def show_status(url: str, *, as_json: bool) -> int:
    """Print the status; the exit code is 0 (what cannot be fetched raises)."""
    status = fetch_status(url)
    if as_json:
        json.dump(status, sys.stdout, indent=2)
        print()
    else:
        Console().print(render(status))
    return 0


def render(status: Mapping[str, Any]) -> RenderableType:
    """Single values first, then one titled table per nested object or list."""
    simple = {key: value for key, value in status.items() if not isinstance(value, (dict, list))}
    parts: list[RenderableType] = [_pairs(simple)] if simple else []
    for key, value in status.items():
        if isinstance(value, dict):
            parts += [Text(f"\n{key}", "bold"), _pairs(value) if value else Text("  none", "dim")]
        elif isinstance(value, list):
            parts += [Text(f"\n{key}", "bold"), _rows(value) if value else Text("  none", "dim")]
    return Group(*parts)


def _pairs(values: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 3))
    for key, value in values.items():
        table.add_row(Text(f"  {key}", "cyan"), _cell(value))
    return table


def _rows(values: list[Any]) -> Table:
    if not all(isinstance(value, dict) for value in values):
        return _pairs({str(index): value for index, value in enumerate(values)})
    columns = list(dict.fromkeys(key for value in values for key in value))
    table = Table(*columns, box=None, header_style="cyan", padding=(0, 2))
    for value in values:
        table.add_row(*(_cell(value.get(column, "")) for column in columns))
    return table


def _cell(value: Any) -> Text:
    if isinstance(value, dict):
        return Text(", ".join(f"{key}={_cell(inner).plain}" for key, inner in value.items()))
    if isinstance(value, list):
        return Text(", ".join(_cell(inner).plain for inner in value))
    return Text(f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value))
