# SPDX-License-Identifier: Apache-2.0
"""The part that knows vLLM: connector halves and the few functions that the edits call."""
