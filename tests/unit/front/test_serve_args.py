# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` arguments: the default of --host, the secret file, and what --pd-role does not go with."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_pd.config import PDConfig
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.front.flags import add_pd_arguments
from vllm_ascend_pd.front.resolve import check_engine_config, resolve_pd
from vllm_ascend_pd.front.serve_args import check_serve_args, settle_serve_args


@pytest.fixture(autouse=True)
def _state_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in list(os.environ):
        if name.startswith("VLLM_PD_"):
            monkeypatch.delenv(name)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123456789abcdef")
    path.chmod(0o600)
    return path


def serve_args(words: str, **values: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_pd_arguments(parser)
    args = parser.parse_args(words.split())
    fields = {"host": None, "uds": None, "headless": False, "grpc": False, **values}
    for name, value in fields.items():
        setattr(args, name, value)
    return args


def engine_args(args: argparse.Namespace, **values: Any) -> argparse.Namespace:
    fields = {"kv_transfer_config": None, "speculative_config": None, "shutdown_timeout": 0, **values}
    for name, value in fields.items():
        setattr(args, name, value)
    return args


def pd_of(args: argparse.Namespace) -> PDConfig:
    return PDConfig.from_dict(args.kv_transfer_config.kv_connector_extra_config["pd"])


def test_without_a_role_nothing_is_touched() -> None:
    args = serve_args("")
    settle_serve_args(args, {})
    assert args.host is None
    assert not hasattr(args, "pd_instance")


def test_without_a_secret_file_the_host_defaults_to_loopback() -> None:
    args = serve_args("--pd-role prefill")
    settle_serve_args(args, {})
    assert args.host == "127.0.0.1"
    assert args.pd_instance["http_host"] == "127.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "myhost"])
def test_without_a_secret_file_another_host_is_refused_by_name(host: str) -> None:
    with pytest.raises(PDConfigError, match=rf"--host {host} .*--pd-secret-file"):
        settle_serve_args(serve_args("--pd-role prefill", host=host), {})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_hosts_are_kept(host: str) -> None:
    args = serve_args("--pd-role prefill", host=host)
    settle_serve_args(args, {})
    assert args.host == host


def test_with_a_secret_file_the_host_is_the_user_s_business(secret: Path) -> None:
    args = serve_args(f"--pd-role prefill --pd-secret-file {secret}")
    settle_serve_args(args, {})
    assert args.host is None
    args = serve_args(f"--pd-role prefill --pd-secret-file {secret}", host="0.0.0.0")
    settle_serve_args(args, {})
    assert args.host == "0.0.0.0"


def test_a_bad_secret_file_stops_the_command_before_anything_starts(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    empty = tmp_path / "empty"
    empty.touch(0o600)
    readable = tmp_path / "readable"
    readable.write_text("0123456789abcdef")
    readable.chmod(0o644)
    for path in (missing, empty, readable):
        with pytest.raises(PDConfigError, match=str(path)):
            settle_serve_args(serve_args(f"--pd-role prefill --pd-secret-file {path}"), {})


def test_the_command_ends_with_status_2_and_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        check_serve_args(serve_args("--pd-prefill http://a:1"))
    assert caught.value.code == 2
    assert capsys.readouterr().err.strip() == (
        "vllm serve: error: --pd-prefill http://a:1 needs --pd-role decode, which is not given"
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_rust_front_end_is_refused(role: str) -> None:
    with pytest.raises(PDConfigError, match="VLLM_USE_RUST_FRONTEND=1"):
        settle_serve_args(serve_args(f"--pd-role {role}"), {"VLLM_USE_RUST_FRONTEND": "1"})
    settle_serve_args(serve_args(f"--pd-role {role}"), {"VLLM_USE_RUST_FRONTEND": "0"})


@pytest.mark.parametrize("flag", ["grpc", "headless"])
def test_modes_without_our_endpoints_are_refused(flag: str) -> None:
    with pytest.raises(PDConfigError, match=f"--{flag}"):
        settle_serve_args(serve_args("--pd-role prefill", **{flag: True}), {})


def test_a_node_with_workers_only_needs_what_makes_them_reachable(secret: Path) -> None:
    words = f"--pd-role prefill --pd-secret-file {secret}"
    node = {"headless": True, "node_rank": 1}
    args = serve_args(words, host="10.0.0.3", **node)
    settle_serve_args(args, {})
    assert args.pd_instance["http_host"] == "10.0.0.3"
    for host in (None, "0.0.0.0"):
        with pytest.raises(PDConfigError, match="--node-rank 1 needs --host"):
            settle_serve_args(serve_args(words, host=host, **node), {})
    with pytest.raises(PDConfigError, match="--node-rank 1 needs --pd-secret-file"):
        settle_serve_args(serve_args("--pd-role prefill", host="10.0.0.3", **node), {})
    with pytest.raises(PDConfigError, match="--headless"):
        settle_serve_args(serve_args(words, host="10.0.0.3", headless=True, node_rank=0), {})


def test_the_runtime_directory_is_private() -> None:
    args = serve_args("--pd-role prefill")
    settle_serve_args(args, {})
    directory = Path(args.pd_instance["runtime_dir"])
    assert directory.stat().st_mode & 0o777 == 0o700
    assert len(str(directory / "core.sock")) < 107


def test_peers_are_listened_for_where_http_is(secret: Path) -> None:
    pytest.importorskip("vllm")
    for host, expected in ((None, "0.0.0.0"), ("10.0.0.1", "10.0.0.1")):
        args = engine_args(serve_args(f"--pd-role prefill --pd-secret-file {secret}", host=host))
        settle_serve_args(args, {})
        resolve_pd(args, {})
        assert pd_of(args).listen_host == expected


class TestResolve:
    """EngineArgs to KVTransferConfig."""

    @pytest.fixture(autouse=True)
    def _needs_vllm(self) -> None:
        pytest.importorskip("vllm")

    def resolve(self, words: str, **values: Any) -> argparse.Namespace:
        args = engine_args(serve_args(words), pd_instance=None, **values)
        resolve_pd(args, {})
        return args

    def test_no_role_leaves_the_arguments_alone(self) -> None:
        args = self.resolve("")
        assert args.kv_transfer_config is None
        assert args.shutdown_timeout == 0

    @pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
    def test_a_role_becomes_a_connector(self, role: str, kv_role: str) -> None:
        found = self.resolve(f"--pd-role {role}").kv_transfer_config
        assert (found.kv_connector, found.kv_role) == ("DataDistConnector", kv_role)
        assert found.kv_load_failure_policy == "recompute"
        assert found.engine_id == PDConfig.from_dict(found.kv_connector_extra_config["pd"]).engine_id

    def test_policy_fail_reaches_the_scheduler(self) -> None:
        found = self.resolve("--pd-role decode --pd-load-failure fail").kv_transfer_config
        assert found.kv_load_failure_policy == "fail"

    def test_repeating_it_changes_nothing(self) -> None:
        args = self.resolve("--pd-role decode")
        before = args.kv_transfer_config
        resolve_pd(args, {})
        assert args.kv_transfer_config is before

    def test_api_server_processes_share_the_instance_of_the_command(self) -> None:
        """--api-server-count 2: each process builds its own config from the same arguments."""
        command = engine_args(serve_args("--pd-role decode"))
        settle_serve_args(command, {})
        first, second = (argparse.Namespace(**vars(command)) for _ in range(2))
        resolve_pd(first, {})
        resolve_pd(second, {})
        assert pd_of(first) == pd_of(second)

    def test_two_engines_of_one_process_do_not_share_an_instance(self) -> None:
        first, second = self.resolve("--pd-role decode"), self.resolve("--pd-role decode")
        assert pd_of(first).engine_id != pd_of(second).engine_id
        assert pd_of(first).runtime_dir != pd_of(second).runtime_dir

    def test_running_requests_get_time_to_end_at_shutdown(self) -> None:
        assert self.resolve("--pd-role decode").shutdown_timeout == 60
        assert self.resolve("--pd-role decode --pd-deadline 5").shutdown_timeout == 30
        assert self.resolve("--pd-role decode", shutdown_timeout=7).shutdown_timeout == 7

    def test_another_connector_is_composed(self) -> None:
        """F28."""
        theirs = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "engine_id": "x"}
        theirs["kv_connector_extra_config"] = {"cpu_bytes_to_use": 1}  # type: ignore[assignment]
        found = self.resolve("--pd-role decode", kv_transfer_config=theirs).kv_transfer_config
        assert (found.kv_connector, found.kv_role) == ("MultiConnector", "kv_both")
        ours, other = found.kv_connector_extra_config["connectors"]
        assert (ours["kv_connector"], ours["kv_role"]) == ("DataDistConnector", "kv_consumer")
        assert ours["kv_connector_extra_config"]["pd"] == found.kv_connector_extra_config["pd"]
        assert (other["kv_connector"], other["kv_connector_extra_config"]) == (
            "OffloadingConnector",
            {"cpu_bytes_to_use": 1},
        )
        assert "engine_id" not in ours
        assert "engine_id" not in other

    def test_the_children_of_a_multi_connector_join_ours(self) -> None:
        children = [{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}]
        theirs = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}
        found = self.resolve("--pd-role prefill", kv_transfer_config=theirs).kv_transfer_config
        names = [child["kv_connector"] for child in found.kv_connector_extra_config["connectors"]]
        assert names == ["DataDistConnector", "OffloadingConnector"]

    @pytest.mark.parametrize(
        "name",
        ["NixlConnector", "NixlPushConnector", "MooncakeConnector", "P2pNcclConnector", "MoRIIOConnector"]
        + ["DataDistConnector", "LLMDataDistCMgrConnector", "MooncakeLayerwiseConnector", "DecodeBenchConnector"]
        + ["MooncakeConnectorV1", "HIXLConnector"],
    )
    def test_another_pd_connector_is_refused_by_name(self, name: str) -> None:
        for theirs in (
            {"kv_connector": name},
            {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{"kv_connector": name}]}},
        ):
            with pytest.raises(PDConfigError, match=f"{name}.*--pd-role decode"):
                self.resolve("--pd-role decode", kv_transfer_config=theirs)

    @pytest.mark.parametrize("name", ["MooncakeStoreConnector", "MooncakeConnectorStoreV1", "AscendStoreConnector"])
    def test_a_store_is_not_taken_for_a_pd_connector(self, name: str) -> None:
        theirs = {"kv_connector": name, "kv_role": "kv_both"}
        found = self.resolve("--pd-role decode", kv_transfer_config=theirs).kv_transfer_config
        assert found.kv_connector == "MultiConnector"

    @pytest.mark.parametrize(
        ("field", "value", "flag"),
        [
            ("speculative_config", {"method": "ngram"}, "--speculative-config"),
            ("spec_model", "m", "--spec-model"),
            ("kv_offloading_size", 4.0, "--kv-offloading-size"),
            ("pipeline_parallel_size", 2, "--pipeline-parallel-size 2"),
            ("data_parallel_size", 2, "--data-parallel-size 2"),
            ("decode_context_parallel_size", 2, "--decode-context-parallel-size 2"),
            ("prefill_context_parallel_size", 2, "--prefill-context-parallel-size 2"),
        ],
    )
    def test_what_pd_does_not_carry_is_refused_by_flag(self, field: str, value: object, flag: str) -> None:
        with pytest.raises(PDConfigError, match=flag):
            self.resolve("--pd-role prefill", **{field: value})

    def vllm_config(self, **values: Any) -> SimpleNamespace:
        args = self.resolve("--pd-role decode")
        parallel = {"pipeline_parallel_size": 1, "data_parallel_size": 1}
        model = {"runner_type": "generate", "is_encoder_decoder": False, "multimodal_config": None}
        return SimpleNamespace(
            kv_transfer_config=args.kv_transfer_config,
            speculative_config=values.get("speculative_config"),
            parallel_config=SimpleNamespace(**{k: values.get(k, v) for k, v in parallel.items()}),
            model_config=SimpleNamespace(**{k: values.get(k, v) for k, v in model.items()}),
        )

    @pytest.mark.parametrize(
        ("field", "value", "word"),
        [
            ("speculative_config", object(), "speculative"),
            ("runner_type", "pooling", "pooling runner"),
            ("is_encoder_decoder", True, "encoder-decoder"),
            ("pipeline_parallel_size", 2, "pipeline"),
        ],
    )
    def test_what_only_the_model_shows_is_refused_too(self, field: str, value: object, word: str) -> None:
        check_engine_config(self.vllm_config(), SimpleNamespace())
        with pytest.raises(PDConfigError, match=word):
            check_engine_config(self.vllm_config(**{field: value}), SimpleNamespace())

    def test_a_decode_instance_still_wants_media_with_their_data(self) -> None:
        media = SimpleNamespace(allow_missing_mm_embeddings=True, enable_mm_embeds=True)
        check_engine_config(self.vllm_config(multimodal_config=media), SimpleNamespace(enable_mm_embeds=False))
        assert (media.allow_missing_mm_embeddings, media.enable_mm_embeds) == (False, False)
