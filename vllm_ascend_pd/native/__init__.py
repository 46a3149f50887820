# SPDX-License-Identifier: Apache-2.0
"""The C++ host library: `library` loads it, the other modules are typed wrappers of one part of its C ABI each."""
