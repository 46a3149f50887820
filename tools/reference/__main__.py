# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.reference write|check|kv CONFIG`.

`write` writes `docs/reference/`, `check` prints what differs from the code and fails then, `kv` prints the KV bytes per
token of the model whose `config.json` it is given.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.reference.pages import find_drift, write_pages
from tools.reference.sizes import model_table, read_config


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.reference", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("verb", choices=("write", "check", "kv"))
    parser.add_argument("config", type=Path, nargs="?", help="kv: a model's config.json")
    options = parser.parse_args()
    if options.verb == "kv":
        if options.config is None:
            parser.error("kv needs the path of a config.json")
        print(model_table((read_config(options.config),)))
        return 0
    if options.verb == "write":
        print("\n".join(write_pages()) or "nothing changed")
        return 0
    drift = find_drift()
    if drift:
        print("\n\n".join(drift))
        print("\ndocs/reference/ is not what the code says: run `python -m tools.reference write`", file=sys.stderr)
    return 1 if drift else 0


if __name__ == "__main__":
    sys.exit(main())
