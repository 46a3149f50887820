#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What the wheel needs, into a new environment in /opt/vllm: requirements.sh FOLDER
# PYTORCH_INDEX: where torch's CPU build comes from ("" where the package index or PIP_FIND_LINKS has it). On x86-64 the
# package index has the CUDA build, which works and costs several GB.
set -eu

folder=${1:?requirements.sh FOLDER}
python3 -m venv /opt/vllm
/opt/vllm/bin/pip install --no-cache-dir --disable-pip-version-check \
    ${PYTORCH_INDEX:+--extra-index-url "$PYTORCH_INDEX"} ${ASCEND_INDEX:+--extra-index-url "$ASCEND_INDEX"} \
    --requirement "$folder/requirements.txt"
