# SPDX-License-Identifier: Apache-2.0
"""Which NPUs this process can use, read from the system: nobody types a device's address.

Reading order: `numbering` (three ways to count), `inventory` (the questions asked), `addresses`, `outputs` and `hccn`
(formats), `system` (commands and files). Not run on an NPU; the formats come from public descriptions.
"""

from vllm_ascend_pd.ascend.devices.errors import (
    CommandError,
    DeviceError,
    NoDevicesError,
    ToolMissingError,
    UnknownOutputError,
)
from vllm_ascend_pd.ascend.devices.facts import DeviceFacts, Finding, Inventory
from vllm_ascend_pd.ascend.devices.hccn import HccnConf, hccn_conf
from vllm_ascend_pd.ascend.devices.health import (
    ChipHealth,
    LinkState,
    TlsSwitch,
    link_state,
    local_addresses,
    npu_health,
    tls_switch,
)
from vllm_ascend_pd.ascend.devices.inventory import Network, discover, inventory, to_addresses
from vllm_ascend_pd.ascend.devices.numbering import VISIBLE_VARIABLE
from vllm_ascend_pd.ascend.devices.system import CommandResult, System

__all__ = [
    "VISIBLE_VARIABLE",
    "ChipHealth",
    "CommandError",
    "CommandResult",
    "DeviceError",
    "DeviceFacts",
    "Finding",
    "HccnConf",
    "Inventory",
    "LinkState",
    "Network",
    "NoDevicesError",
    "System",
    "TlsSwitch",
    "ToolMissingError",
    "UnknownOutputError",
    "discover",
    "hccn_conf",
    "inventory",
    "link_state",
    "local_addresses",
    "npu_health",
    "tls_switch",
    "to_addresses",
]
