// SPDX-License-Identifier: Apache-2.0
#include "queue.h"

#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

namespace pd::npu {

void enqueue(const char* name, std::function<int()> task) {
  at_npu::native::OpCommand command;
  command.Name(name).SetCustomHandler(std::move(task)).Run();
}

void* current_stream() { return c10_npu::getCurrentNPUStream().stream(false); }

}  // namespace pd::npu
