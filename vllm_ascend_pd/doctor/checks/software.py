# SPDX-License-Identifier: Apache-2.0
"""What is installed: versions that belong together, the C++ library, the data plane's implementation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable

from vllm_ascend_pd import __version__
from vllm_ascend_pd.ascend.pairing import Verdict
from vllm_ascend_pd.doctor.check import Check, State, fail, not_applicable, ok
from vllm_ascend_pd.doctor.host import Host
from vllm_ascend_pd.native import library


def check_versions(verdicts: Iterable[Verdict], vllm_version: str | None) -> list[Check]:
    """Our own version, and what `ascend.pairing` says of the packages that must pair on an NPU host."""
    checks = [_check_distribution(vllm_version)]
    for verdict in verdicts:
        key = f"software.{verdict.name.lower().replace('_', '-')}"
        if verdict.name == "npu":  # there is none: nothing has to pair
            checks.append(not_applicable("software.pairing", f"{verdict.seen}: no versions have to pair"))
        elif verdict.name == "vllm":  # of the lane, where NPUs are
            checks[0] = Check(key, State(verdict.level), verdict.seen, verdict.advice)
        else:
            checks.append(Check(key, State(verdict.level), verdict.seen, verdict.advice))
    return checks


def _check_distribution(version: str | None) -> Check:
    key = "software.vllm"
    if version is None:
        return fail(key, "the distribution `vllm` is not installed here", "install the wheel that `make build` makes")
    if "+pd." in version:
        return ok(key, version)
    # A development checkout runs over an overlay of upstream's wheel, so this is no failure.
    return ok(key, f"{version} of upstream, with vllm-ascend-pd {__version__} beside it")


def check_library(load: Callable[[], object] = library.load) -> Check:
    """The C++ core, without which nothing can be copied."""
    key = "software.native-library"
    try:
        load()
    except ImportError as error:
        return fail(key, str(error), "install the wheel for this machine's architecture, or build the library")
    return ok(key, f"loaded, ABI version {library.ABI_VERSION}")


def check_data_plane(host: Host, find_spec: Callable[[str], object] = importlib.util.find_spec) -> Check:
    """Which implementation of llm_datadist an engine here would use."""
    key, num_npus = "software.data-plane", host.count_npus()
    if num_npus == 0:
        return ok(key, "host implementation (mapped memory and TCP): no NPU is visible")
    if find_spec("llm_datadist") is None:
        return fail(
            key,
            f"{num_npus} NPUs are visible and the Python package llm_datadist is not: KV would not leave the NPU",
            "install CANN's toolkit, source its set_env.sh, and start again (llm_datadist lies on its PYTHONPATH)",
        )
    return ok(key, f"CANN's llm_datadist, {num_npus} NPUs (not run on an NPU by the authors)")
