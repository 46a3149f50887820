# SPDX-License-Identifier: Apache-2.0
"""What is particular to Ascend hosts: devices, rank tables, what pairs with what. No vLLM, no torch."""
