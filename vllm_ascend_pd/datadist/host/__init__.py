# SPDX-License-Identifier: Apache-2.0
"""Our implementation of `llm_datadist` for machines without an NPU; see docs/datadist.md for what it covers."""
