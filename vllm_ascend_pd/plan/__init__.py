# SPDX-License-Identifier: Apache-2.0
"""Pure planning: which bytes of which source block go where. No sockets, no vLLM, no torch."""
