# SPDX-License-Identifier: Apache-2.0
"""The lane `ascend-cpu`: the engine code of the Ascend lane (vLLM 0.23.0) on a CPU, in an environment of its own."""
