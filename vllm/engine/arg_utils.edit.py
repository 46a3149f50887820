# SPDX-License-Identifier: Apache-2.0
"""Edits to `vllm/engine/arg_utils.py`: the `--pd-*` flags, on every entry point.

Why here      `EngineArgs` is filled from argparse by field name; a flag that is not a field never reaches
              `create_engine_config`, and a plug-in runs too late to add one. `LLM(pd_role=…)` comes for free.
What it does  The fields and the flag group exist; `resolve_pd` turns them into the `kv_transfer_config`
              that upstream already understands, and `check_engine_config` refuses what PD does not carry.
              All fields default to None: without a role nothing changes.
Kind          plug-in point missing upstream        Forwarded  no
Drop when     Upstream lets a plug-in add an argument group to `vllm serve`.
"""

from tools.fork import AddField, AddImport, Assignment, Call, InsertAfter, InsertBefore

UPSTREAM = ("vllm/engine/arg_utils.py",)

EDITS = (
    AddImport("from vllm_ascend_pd.front.flags import add_pd_arguments"),
    AddImport("from vllm_ascend_pd.front.resolve import check_engine_config, resolve_pd"),
    AddField("pd_role: str | None = None", cls="EngineArgs", after="kv_transfer_config"),
    AddField("pd_prefill: list[str] | None = None", cls="EngineArgs", after="pd_role"),
    AddField("pd_listen: str | None = None", cls="EngineArgs", after="pd_prefill"),
    AddField("pd_secret_file: str | None = None", cls="EngineArgs", after="pd_listen"),
    AddField("pd_load_failure: str | None = None", cls="EngineArgs", after="pd_secret_file"),
    AddField("pd_require_remote_kv: bool | None = None", cls="EngineArgs", after="pd_load_failure"),
    AddField("pd_lease: str | float | None = None", cls="EngineArgs", after="pd_require_remote_kv"),
    AddField("pd_deadline: str | float | None = None", cls="EngineArgs", after="pd_lease"),
    AddField("pd_start_timeout: str | float | None = None", cls="EngineArgs", after="pd_deadline"),
    AddField("pd_host_transport: str | None = None", cls="EngineArgs", after="pd_start_timeout"),
    AddField("pd_verify: str | None = None", cls="EngineArgs", after="pd_host_transport"),
    AddField("pd_transfer: str | None = None", cls="EngineArgs", after="pd_verify"),
    AddField("pd_rank_table: str | None = None", cls="EngineArgs", after="pd_transfer"),
    AddField("pd_instance: dict[str, str] | None = None", cls="EngineArgs", after="pd_rank_table"),
    InsertAfter(
        "add_pd_arguments(parser)",
        scope="EngineArgs.add_cli_args",
        anchor=Call("add_argument", argument="--kv-transfer-config"),
    ),
    InsertBefore(
        "resolve_pd(self)",
        scope="EngineArgs.create_engine_config",
        anchor=Assignment("config", callee="VllmConfig"),
    ),
    InsertAfter(
        "check_engine_config(config, self)",
        scope="EngineArgs.create_engine_config",
        anchor=Assignment("config", callee="VllmConfig"),
    ),
)
