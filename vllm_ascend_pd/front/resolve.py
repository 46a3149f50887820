# SPDX-License-Identifier: Apache-2.0
"""From engine arguments to the `kv_transfer_config` that upstream's engine understands.

Called by `EngineArgs.create_engine_config` in every process that builds a VllmConfig: once where the engine
core is started, and again in each API server. All of them must name the same engine id and socket directory:
the instance is made once (by `serve_args.py` before the processes part, or here) and travels with the
arguments.
"""

from __future__ import annotations

import math
import multiprocessing.util
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any, Final

from vllm_ascend_pd.ascend.together import refuse_model, refuse_settings
from vllm_ascend_pd.config import EXTRA_CONFIG_KEY, PDConfig, PDRole, pd_config_of
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.front.flags import Given, read_options

CONNECTOR: Final = "DataDistConnector"
MIN_SHUTDOWN_TIMEOUT_S: Final = 30
_OTHER_PD_CONNECTORS: Final = re.compile(r"nixl|p2pnccl|moriio|datadist|decodebench|hixl|^mooncake(?!.*store)", re.I)
_MAX_SOCKET_DIR_LENGTH: Final = 80  # a Unix socket path ends at 107 bytes


def new_instance(http_host: str = "") -> dict[str, str]:
    """Fresh identity and private socket directory, which goes when this process exits (not a fork of it)."""
    parent = tempfile.gettempdir()
    directory = tempfile.mkdtemp(prefix="vllm-pd-", dir=parent if len(parent) < _MAX_SOCKET_DIR_LENGTH else "/tmp")
    # Unlike atexit, this also runs in multiprocessing children, and never in a fork of its creator.
    multiprocessing.util.Finalize(None, shutil.rmtree, args=(directory, True), exitpriority=0)
    return {
        "engine_id": f"pd-{secrets.token_hex(8)}",
        "epoch": secrets.token_hex(8),
        "runtime_dir": directory,
        "http_host": http_host,
    }


def resolve_pd(engine_args: Any, environ: Mapping[str, str] = os.environ) -> None:
    """Fill `engine_args.kv_transfer_config` from the `--pd-*` flags. No-op without a role; repeatable.

    Raises:
        PDConfigError: names the flag and what it does not go with.
    """
    if _is_resolved(engine_args.kv_transfer_config):
        return
    given = read_options(engine_args, environ)
    if "role" not in given:
        return
    _refuse_unsupported(engine_args, given)
    refuse_typed(given["role"].value, engine_args, environ)
    if getattr(engine_args, "pd_instance", None) is None:
        engine_args.pd_instance = new_instance()
    pd_config = build_config(given, engine_args.pd_instance)
    engine_args.kv_transfer_config = _transfer_config(pd_config, engine_args.kv_transfer_config)
    if engine_args.shutdown_timeout == 0:
        engine_args.shutdown_timeout = max(MIN_SHUTDOWN_TIMEOUT_S, math.ceil(pd_config.deadline_s))


def refuse_typed(role: str, args: Any, environ: Mapping[str, str]) -> None:
    """Refuse settings of vllm-ascend that do not go with a role.

    Raises:
        PDConfigError: names flag and value.
    """
    eager = bool(getattr(args, "enforce_eager", False))
    refuse_settings(role, getattr(args, "additional_config", None), environ, eager=eager)


def build_config(given: Mapping[str, Given], instance: Mapping[str, str]) -> PDConfig:
    """The PDConfig of an instance; defaults that depend on one another are settled here."""
    values: dict[str, Any] = {
        word: item.value for word, item in given.items() if word not in ("role", "listen", "prefill")
    }
    http_host = instance.get("http_host", "")
    if "listen" in given:
        listen_host, listen_port = given["listen"].value
    else:
        listen_host, listen_port = http_host or ("0.0.0.0" if "secret-file" in given else "127.0.0.1"), 0
    durations = {
        f"{word.replace('-', '_')}_s": values.pop(word)
        for word in ("lease", "deadline", "start-timeout")
        if word in values
    }
    return PDConfig(
        role=PDRole(given["role"].value),
        engine_id=instance["engine_id"],
        epoch=instance["epoch"],
        runtime_dir=instance["runtime_dir"],
        http_host=http_host,
        listen_host=listen_host,
        listen_port=listen_port,
        prefill_urls=given["prefill"].value if "prefill" in given else (),
        **durations,
        **{word.replace("-", "_"): value for word, value in values.items()},
    )


def check_engine_config(vllm_config: Any, engine_args: Any) -> None:
    """Refuse, by name, what this release does not carry through PD. Called with the finished VllmConfig.

    Also restores upstream's check that media come with their data: a consumer of encoder caches is excused
    from it, but a decode instance of ours computes media itself.

    Raises:
        PDConfigError: names the feature.
    """
    pd_config = pd_config_of(vllm_config)
    if pd_config is None:
        return
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    found = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "--pipeline-parallel-size > 1": parallel.pipeline_parallel_size > 1,
        "--data-parallel-size > 1": parallel.data_parallel_size > 1,
        "--decode-context-parallel-size > 1": getattr(parallel, "decode_context_parallel_size", 1) > 1,
        "--prefill-context-parallel-size > 1": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        f"the {model.runner_type} runner": model.runner_type != "generate",
        "an encoder-decoder model": bool(getattr(model, "is_encoder_decoder", False)),
    }
    for feature, present in found.items():
        if present:
            raise _unsupported(pd_config.role.value, feature)
    refuse_model(pd_config.role.value, getattr(vllm_config, "quant_config", None))
    media = getattr(model, "multimodal_config", None)
    if media is not None and getattr(media, "allow_missing_mm_embeddings", False):
        media.allow_missing_mm_embeddings = False
        media.enable_mm_embeds = engine_args.enable_mm_embeds


def _is_resolved(transfer_config: Any) -> bool:
    if transfer_config is None or isinstance(transfer_config, dict):
        return False
    return EXTRA_CONFIG_KEY in (transfer_config.kv_connector_extra_config or {})


def _unsupported(role: str, feature: str) -> PDConfigError:
    return PDConfigError(f"--pd-role {role} does not go with {feature} in this release: leave one of them out")


def _refuse_unsupported(engine_args: Any, given: Mapping[str, Given]) -> None:
    """What is visible in the arguments already, before a model is looked at."""
    role = given["role"].value
    found = {
        "--speculative-config": engine_args.speculative_config,
        "--spec-method": getattr(engine_args, "spec_method", None),
        "--spec-model": getattr(engine_args, "spec_model", None),
        "--kv-offloading-size": getattr(engine_args, "kv_offloading_size", None),
        "--ec-transfer-config": getattr(engine_args, "ec_transfer_config", None),
    }
    for flag, value in found.items():
        if value:
            raise _unsupported(role, flag)
    for flag in (
        "pipeline-parallel-size",
        "data-parallel-size",
        "decode-context-parallel-size",
        "prefill-context-parallel-size",
    ):
        size = getattr(engine_args, flag.replace("-", "_"), 1) or 1
        if size > 1:
            raise _unsupported(role, f"--{flag} {size}")


def _transfer_config(pd_config: PDConfig, theirs: Any) -> Any:
    """Our KVTransferConfig, composed with the user's own where there is one."""
    from vllm.config import KVTransferConfig

    ours: dict[str, Any] = {
        "kv_connector": CONNECTOR,
        "kv_role": pd_config.role.kv_role,
        "kv_load_failure_policy": "fail" if pd_config.load_failure == "fail" else "recompute",
        "kv_connector_extra_config": {EXTRA_CONFIG_KEY: pd_config.to_dict()},
    }
    children = _their_connectors(pd_config.role.value, theirs)
    if not children:
        return KVTransferConfig(engine_id=pd_config.engine_id, **ours)
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        engine_id=pd_config.engine_id,
        kv_load_failure_policy=ours["kv_load_failure_policy"],
        # "pd" stands at the top as well: there the front door looks for it.
        kv_connector_extra_config={EXTRA_CONFIG_KEY: pd_config.to_dict(), "connectors": [ours, *children]},
    )


def _their_connectors(role: str, theirs: Any) -> list[dict[str, Any]]:
    """The user's own connectors as MultiConnector children.

    Raises:
        PDConfigError: one of them does prefill/decode disaggregation itself.
    """
    if theirs is None:
        return []

    def read(key: str) -> Any:
        return theirs.get(key) if isinstance(theirs, dict) else getattr(theirs, key, None)

    name = read("kv_connector")
    if name is None:
        return []
    extra = read("kv_connector_extra_config") or {}
    if name == "MultiConnector":
        children = [dict(child) for child in extra.get("connectors", [])]
    else:
        keys = ("kv_connector", "kv_role", "kv_connector_module_path", "kv_buffer_device", "kv_port")
        children = [{key: read(key) for key in keys if read(key) is not None}]
        children[0]["kv_connector_extra_config"] = extra
    for child in children:
        child.pop("engine_id", None)  # MultiConnector passes ours; twice is an error
        connector = str(child.get("kv_connector"))
        if _OTHER_PD_CONNECTORS.search(connector):
            raise PDConfigError(
                f"--kv-transfer-config: {connector} does prefill/decode disaggregation itself and does not "
                f"go with --pd-role {role}: leave one of them out"
            )
    return children
