# SPDX-License-Identifier: Apache-2.0
"""Become a server that ends with its supervisor: `python exec_child.py SUPERVISOR_PID COMMAND...` (Linux).

Asks the kernel for SIGTERM at the parent's death, then replaces itself by the command: same process id, no process in
between. A program of its own, because doing this between fork and exec of a threaded parent is not safe.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the signal, make sure that the parent is still there, exec."""
    supervisor, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != supervisor:
        sys.exit("the supervisor is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
