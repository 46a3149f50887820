# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_ascend_pd.bench stages|transfer …`: the same as `vllm pd bench …`, without vLLM."""

from __future__ import annotations

import sys

from vllm_ascend_pd.bench.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
