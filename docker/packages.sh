#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Distribution packages of one part of the image: wheel | cpu | ascend. Debian or Ubuntu.
set -eu

case "${1:-}" in
# Builds the wheel; compilers come from the package index, with pinned hashes.
wheel) packages="ca-certificates python3 python3-venv" ;;
# Runs it. g++ and python3-dev: torch.compile builds kernels at start (not with --enforce-eager).
cpu) packages="ca-certificates python3 python3-venv python3-dev g++ libnuma1 tini" ;;
# The base has Python and CANN. The rest is what vllm-ascend builds with, and what triton-ascend runs.
ascend) packages="ca-certificates g++ cmake make clang-15 libnuma-dev libibverbs-dev libjemalloc2 numactl tini" ;;
*)
    echo "packages.sh: wheel, cpu or ascend, not '${1:-}'" >&2
    exit 2
    ;;
esac
command -v apt-get >/dev/null || {
    echo "packages.sh: this base has no apt-get; choose a Debian or Ubuntu one (docs/containers.md)" >&2
    exit 1
}
export DEBIAN_FRONTEND=noninteractive
apt-get update
# shellcheck disable=SC2086  # a list of words
apt-get install -y --no-install-recommends $packages
apt-get clean
rm -rf /var/lib/apt/lists/*
