#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Pick a Python for `.venv` (PYTHON=... decides it) and hand over to tools/setup_env.py.
# 3.11 first: it is what CI runs. Each candidate is tried, because a pyenv shim may exist and not work.
set -eu
cd "$(dirname "$0")/.."
tried=""
for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3}; do
    command -v "$candidate" >/dev/null 2>&1 || { tried="$tried $candidate(not found)"; continue; }
    if ! "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
        tried="$tried $candidate(not 3.10 to 3.13)"
    elif ! "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
        tried="$tried $candidate(no venv: on Debian, apt-get install python3-venv)"
    else
        exec "$candidate" -m tools.setup_env "$@"
    fi
done
echo "setup: no usable Python. Needed: 3.10 to 3.13 with the venv module. Tried:$tried" >&2
echo "setup: name one with PYTHON=/path/to/python3.11 make setup" >&2
exit 1
