# SPDX-License-Identifier: Apache-2.0
"""CANN's own `llm_datadist`: the only file that imports it. What the installed package can do is looked at, not
concluded from a version. Owns no thread. Never run on an NPU: the tests run it over a stand-in of the package.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final

from vllm_ascend_pd.datadist.api import DataDist, DataDistModule, Way
from vllm_ascend_pd.datadist.guard import GuardedDataDist

PACKAGE: Final = "llm_datadist"
NAMES: Final = (
    "LLMConfig",
    "LLMRole",
    "CacheDesc",
    "BlocksCacheKey",
    "DataType",
    "Placement",
    "LLMClusterInfo",
    "LLMStatusCode",
    "LLMException",
)


def is_installed() -> bool:
    """Whether there is such a package; it is not imported."""
    return importlib.util.find_spec(PACKAGE) is not None


def load_cann() -> DataDistModule:
    """CANN's package, behind the checks of `guard.py`.

    Raises:
        ImportError: it is not there, it cannot be loaded, or it lacks what the connector needs.
    """
    try:
        package: Any = importlib.import_module(PACKAGE)
    except ImportError as error:
        raise ImportError(f"CANN's {PACKAGE} cannot be imported: {error}") from error
    missing = [name for name in ("LLMDataDist", *NAMES) if not hasattr(package, name)]
    if missing:
        raise ImportError(f"CANN's {PACKAGE} lacks {', '.join(missing)}: install CANN 8.2 or later")

    def make(role: Any, cluster_id: int) -> DataDist:
        return GuardedDataDist(package.LLMDataDist(role, cluster_id), package)

    return DataDistModule(
        name="cann",
        LLMDataDist=make,
        **{name: getattr(package, name) for name in NAMES},
        ways=find_ways(package),
    )


def find_ways(package: Any) -> tuple[Way, ...]:
    """How this package can link, the best first. A way is there when everything that it needs is there."""
    config, engine = package.LLMConfig, package.LLMDataDist
    has_one_sided = hasattr(engine, "link_clusters") and hasattr(engine, "unlink_clusters")
    has_comm_res = has_one_sided and hasattr(config, "local_comm_res")
    has_two_sided = all(hasattr(engine, name) for name in ("link", "unlink", "query_register_mem_status"))
    found = {
        Way.HIXL: has_comm_res and hasattr(config, "transfer_backend"),
        Way.COMM_RES: has_comm_res,
        Way.TWO_SIDED: has_two_sided,
    }
    return tuple(way for way, is_there in found.items() if is_there)
