# SPDX-License-Identifier: Apache-2.0
"""Our statistics through upstream's MultiConnector, serialised on the way (served) or not (engine in process)."""

from __future__ import annotations

import dataclasses

import pytest

pytestmark = pytest.mark.engine


class DataDistConnector:
    """Stands for ours: MultiConnector names statistics by class."""

    def __init__(self, stats):
        self._stats = stats

    def get_kv_connector_stats(self):
        return self._stats


@pytest.mark.parametrize("is_serialised", [False, True], ids=["in process", "served"])
def test_statistics_reach_prometheus_from_inside_a_multi_connector(is_serialised):
    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
    from vllm_ascend_pd.engine.prometheus import DataDistPromMetrics, DataDistStats

    multi = object.__new__(multi_connector.MultiConnector)
    multi._connectors = [DataDistConnector(DataDistStats({"tokens": 5, "failures": {}}))]
    stats = multi.get_kv_connector_stats()
    sent = stats.to_dict() if hasattr(stats, "to_dict") else stats.data  # 0.32.0, 0.23.0: what the scheduler sends
    if is_serialised:
        sent = {
            name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
            for name, value in sent.items()
        }
    ours = object.__new__(DataDistPromMetrics)
    recorded = []
    ours.per_engine_labelvalues = {}
    ours._record = lambda data, values: recorded.append(dict(data.items()))
    metrics = object.__new__(multi_connector.MultiKVConnectorPromMetrics)
    metrics._prom_metrics = {"DataDistConnector": ours}
    metrics.observe(sent)
    assert recorded == [{"tokens": 5, "failures": {}}]
