#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Install the wheel of a folder into /opt/vllm: install.sh FOLDER [EXTRA]
# PYTORCH_INDEX: where torch's CPU build comes from ("" where the package index or PIP_FIND_LINKS has it). On x86-64 the
# package index has the CUDA build, which works and costs several GB.
set -eu

folder=${1:?install.sh FOLDER [EXTRA]}
extra=${2:-}
set -- "$folder"/vllm-*.whl
[ $# = 1 ] && [ -f "$1" ] || {
    echo "install.sh: wanted one vllm wheel in $folder, found: $*" >&2
    exit 1
}
python3 -m venv /opt/vllm
/opt/vllm/bin/pip install --no-cache-dir --disable-pip-version-check \
    ${PYTORCH_INDEX:+--extra-index-url "$PYTORCH_INDEX"} "vllm${extra:+[$extra]} @ file://$1"
