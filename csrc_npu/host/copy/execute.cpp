// SPDX-License-Identifier: Apache-2.0
#include "pd/copy_engine.h"
#include "work.h"

namespace pd {

CopyState execute(const CopyPlan& plan, const CopyOptions& options) {
  const CopyWork work(plan, options);
  const std::uint64_t num_chunks = work.num_chunks();
  for (std::uint64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const CopyState stop = reason_to_stop(options);
    if (stop != CopyState::kRunning) {
      work.fence();
      return stop;
    }
    work.copy_chunk(chunk);
  }
  work.fence();
  return CopyState::kDone;
}

}  // namespace pd
