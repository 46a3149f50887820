#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Build the fork's wheel from the checkout in the current folder, and the list of what it needs: wheel.sh LANE OUT [EXTRA]
# VLLM_PD_CACHE (a cache mount) keeps upstream's artefact and the compiler, each checked by its hash at every use.
set -eu

lane=${1:?wheel.sh LANE OUT [EXTRA]}
out=${2:?wheel.sh LANE OUT [EXTRA]}
extra=${3:-}
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
python3 -m venv "$venv"
libcst=$(sed -n 's/.*"\(libcst==[^"]*\)".*/\1/p' pyproject.toml)
"$venv/bin/pip" install --no-cache-dir --disable-pip-version-check -q "${libcst:?no pin of libcst in pyproject.toml}"
"$venv/bin/python" -m tools.fork wheel --lane "$lane" --out "$out"
mkdir -p "$out/needs"
"$venv/bin/python" -m tools.containers.requirements "$out"/vllm-*.whl "$extra" >"$out/needs/requirements.txt"
