# SPDX-License-Identifier: Apache-2.0
"""`python run_on.py RECORDING ROOT generate …`: `vllm pd ranktable` in a process of its own, on a recorded machine."""

import sys
from pathlib import Path

from tests.unit.ascend.replay import replay
from vllm_ascend_pd.ascend.ranktable.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[3:], replay(sys.argv[1], Path(sys.argv[2]))))
