# SPDX-License-Identifier: Apache-2.0
"""Prefill/decode disaggregation for vLLM: everything that is ours and not inside upstream's tree.

The reading order (one request, front to back) is in `docs/reading-order.md`.
"""

__version__ = "1"
