# SPDX-License-Identifier: Apache-2.0
"""Transfers: leases on the prefill side, loads and pulls on the decode side. Knows nothing of vLLM."""
