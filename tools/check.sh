#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Everything that reads the sources without running them. Runs all of them, then fails if one failed.
set -u
cd "$(dirname "$0")/.."
bin=.venv/bin
failed=""

run() {
    echo "[check] $*"
    name=$(basename "$1")
    [ "${2:-}" != -m ] || name=$3
    "$@" || failed="$failed $name"
}

run $bin/ruff check .
run $bin/ruff format --check .
run $bin/mypy
run $bin/lint-imports
cpp=$(git ls-files -- '*.cpp' '*.h' 2>/dev/null)
# shellcheck disable=SC2086  # file names of this repository hold no blanks
[ -z "$cpp" ] || run $bin/clang-format --dry-run --Werror $cpp
run $bin/python -m tools.size_limits

[ -z "$failed" ] || { echo "[check] failed:$failed" >&2; exit 1; }
