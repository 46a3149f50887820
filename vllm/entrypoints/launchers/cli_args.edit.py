# SPDX-License-Identifier: Apache-2.0
"""Edits to the check of parsed `vllm serve` arguments: `--host`, the secret, and what `--pd-role` does not go with.

Why here      The only place that every serving entry point passes before a socket is bound or a process is started.
What it does  Without a secret file, `--host` defaults to loopback and another address is refused; a bad flag ends the
              command with status 2 and one sentence; the instance's identity is put into the arguments, so that
              several API server processes share it.
Kind          deliberately different        Forwarded  no
Drop when     Never: the default of `--host` is ours.
"""

from tools.fork import AddImport, Call, InsertBefore

UPSTREAM = ("vllm/entrypoints/launchers/cli_args.py", "vllm/entrypoints/openai/cli_args.py")

EDITS = (
    AddImport("from vllm_ascend_pd.front.serve_args import check_serve_args"),
    InsertBefore(
        "check_serve_args(args)",
        scope="validate_parsed_serve_args",
        anchor=Call("validate_chat_template"),
    ),
)
