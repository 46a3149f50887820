#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# `vllm` of the image. Brings in CANN's environment where there is one, so that `docker exec … vllm pd doctor` has it too.
# As a container's first process it puts tini in front: the kernel drops a SIGTERM to process 1 until a handler is
# installed, which vLLM does only seconds after its start, and nobody else would reap orphans.
set -eu

for file in "${ASCEND_TOOLKIT_HOME:-/usr/local/Ascend/ascend-toolkit}/set_env.sh" /usr/local/Ascend/nnal/atb/set_env.sh; do
    if [ -f "$file" ]; then
        set +eu # CANN's scripts are not written for it
        # shellcheck disable=SC1090
        . "$file"
        set -eu
    fi
done
PATH=/opt/vllm/bin:$PATH
export PATH
if [ "$$" = 1 ]; then
    exec tini -- /opt/vllm/bin/vllm "$@"
fi
exec /opt/vllm/bin/vllm "$@"
