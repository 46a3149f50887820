#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Install the wheel of a folder, and nothing else, into /opt/vllm: install.sh FOLDER
set -eu

folder=${1:?install.sh FOLDER}
set -- "$folder"/vllm-*.whl
[ $# = 1 ] && [ -f "$1" ] || {
    echo "install.sh: wanted one vllm wheel in $folder, found: $*" >&2
    exit 1
}
[ -d /opt/vllm ] || python3 -m venv /opt/vllm
/opt/vllm/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps "$1"
