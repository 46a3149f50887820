#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Put the image's commands into /usr/local/bin, then see that what was installed starts: finish.sh cpu | ascend
# On a build machine without an NPU driver nothing of the Ascend image can be imported, so there only versions are read.
set -eu

here=$(dirname "$0")
kind=${1:-}
install -m 0755 "$here/vllm.sh" /usr/local/bin/vllm
install -m 0755 "$here/healthcheck.sh" /usr/local/bin/healthcheck
case "$kind" in
cpu)
    /opt/vllm/bin/pip --disable-pip-version-check check
    vllm --version
    ;;
ascend) /opt/vllm/bin/python -c 'from importlib.metadata import version; print("vllm", version("vllm"))' ;;
*)
    echo "finish.sh: cpu or ascend, not '$kind'" >&2
    exit 2
    ;;
esac
