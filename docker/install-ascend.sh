#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# vllm-ascend and Triton for Ascend into /opt/vllm: install-ascend.sh SOC (ascend910b1 for A2, ascend910_9391 for A3).
# vllm-ascend is a source distribution: its kernels are compiled here against the base image's CANN, for this chip only.
# No driver is needed: devlib has a stub of libascend_hal.so. Needs CANN; not run by this repository's tests.
set -eu

soc=${1:?install-ascend.sh SOC}
vllm_ascend=${VLLM_ASCEND_VERSION:?}
triton_ascend=${TRITON_ASCEND_VERSION:?}
toolkit=${ASCEND_TOOLKIT_HOME:-/usr/local/Ascend/ascend-toolkit}
set +eu # CANN's scripts are not written for it
# shellcheck disable=SC1091
. "$toolkit/set_env.sh" || exit 1
# shellcheck disable=SC1091
[ ! -f /usr/local/Ascend/nnal/atb/set_env.sh ] || . /usr/local/Ascend/nnal/atb/set_env.sh
set -eu
devlib=$(find "${ASCEND_HOME_PATH:?set_env.sh did not set it}/" -maxdepth 2 -type d -name devlib -path "*$(uname -m)-linux*" | head -n 1)
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}:${devlib:?no devlib in $ASCEND_HOME_PATH}"
export SOC_VERSION="$soc"
# Our wheel is what vllm-ascend is installed beside: pip may not replace it, nor the torch that it pins.
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
/opt/vllm/bin/pip freeze | grep -E '^(torch|torch[-_]npu)==' >"$constraints"
pip() {
    /opt/vllm/bin/pip --disable-pip-version-check "$@"
}
install() {
    pip install --no-cache-dir --constraint "$constraints" \
        ${PYTORCH_INDEX:+--extra-index-url "$PYTORCH_INDEX"} ${ASCEND_INDEX:+--extra-index-url "$ASCEND_INDEX"} "$@"
}
install "vllm-ascend==$vllm_ascend"
# NVIDIA's Triton takes the same import name; on x86-64 vLLM brings it in.
pip uninstall -y triton triton-ascend
install --no-deps "triton-ascend==$triton_ascend"
# The extension that gathers and scatters KV on the NPU, against this torch and torch_npu.
/opt/vllm/bin/python -m vllm_ascend_pd.npu.build
