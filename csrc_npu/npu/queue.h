// SPDX-License-Identifier: Apache-2.0
// torch_npu's task queue, without its headers: the one place where our work is put in order with torch's.
//
// Work that torch queued runs on a thread of torch_npu; a runtime call made directly by us could overtake it. So all
// calls that touch a stream are made inside tasks that are put into that queue.
#pragma once

#include <functional>

namespace pd::npu {

// Puts `task` behind everything that was queued before; `task` returns an ACL error. May run it at once where torch_npu
// runs without its queue. Throws what torch_npu throws when its queue has failed.
void enqueue(const char* name, std::function<int()> task);

// The aclrtStream of the current NPU stream, without draining the queue.
void* current_stream();

}  // namespace pd::npu
