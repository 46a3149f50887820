# SPDX-License-Identifier: Apache-2.0
"""`bench stages`: what copying KV out of and into a paged cache costs per layer, and in one call for all layers."""
