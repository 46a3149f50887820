# SPDX-License-Identifier: Apache-2.0
"""Extract and inject of KV blocks on the device: all layers of a cache group in one call, one completion.

`ops` is what others call; it chooses among the backends that `probing` finds. Importing this package imports neither
torch nor torch_npu, so hosts without an NPU pay nothing. Runs in the threads of its callers; nothing here waits for a
device unless an event is asked to.
"""
