# SPDX-License-Identifier: Apache-2.0
"""The datadist connector: prefill/decode disaggregation over llm_datadist."""
