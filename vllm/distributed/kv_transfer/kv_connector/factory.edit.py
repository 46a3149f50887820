# SPDX-License-Identifier: Apache-2.0
"""Edits to `vllm/distributed/kv_transfer/kv_connector/factory.py`: our connector is registered like the built-in ones.

Why here      `--pd-role` names a connector; names are looked up in this registry, at import, in every process.
What it does  One more lazy registration.
Kind          needed to plug in        Forwarded  no
Drop when     Upstream registers connectors through entry points.
"""

from tools.fork import Append

UPSTREAM = ("vllm/distributed/kv_transfer/kv_connector/factory.py",)

EDITS = (
    Append(
        'KVConnectorFactory.register_connector("DataDistConnector", '
        '"vllm.distributed.kv_transfer.kv_connector.v1.datadist.connector", "DataDistConnector")'
    ),
)
