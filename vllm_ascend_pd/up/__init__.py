# SPDX-License-Identifier: Apache-2.0
"""A whole deployment on one machine: `vllm pd up` and `vllm pd status`. Imports neither vLLM nor the connector."""
