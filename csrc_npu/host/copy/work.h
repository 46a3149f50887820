// SPDX-License-Identifier: Apache-2.0
// A plan with everything that its execution needs, cut into chunks.
#pragma once

#include <cstdint>
#include <optional>

#include "checked.h"
#include "kernels.h"
#include "pd/copy_engine.h"
#include "walk.h"

namespace pd {

class CopyWork {
 public:
  CopyWork(const CopyPlan& plan, const CopyOptions& options)
      : kernel_(kernel()),
        streaming_(options.stores == Stores::kNonTemporal ||
                   (options.stores == Stores::kAuto && plan.num_bytes() >= non_temporal_bytes())) {
    if (plan.checksums() == Checksums::kPerPair) {
      checked_.emplace(plan, options.checksums);
    } else {
      require_places(plan, options.checksums);
      plain_.emplace(plan);
    }
  }

  std::uint64_t num_chunks() const { return checked_ ? checked_->num_chunks() : plain_->num_chunks(); }

  void copy_chunk(std::uint64_t chunk) const {
    if (checked_) {
      checked_->copy_chunk(chunk, streaming_);
    } else {
      plain_->copy_chunk(chunk, streaming_ ? kernel_.copy_streaming : kernel_.copy_temporal);
    }
  }

  // Makes this thread's chunks visible to whoever sees them counted as done.
  void fence() const {
    if (streaming_) kernel_.fence();
  }

 private:
  const Kernel& kernel_;
  bool streaming_;
  std::optional<PlanWalk> plain_;
  std::optional<CheckedWalk> checked_;
};

// Why a copy has to stop now, or kRunning. The clock is read only where there is a deadline.
inline CopyState reason_to_stop(const CopyOptions& options) {
  if (options.cancel != nullptr && options.cancel->load(std::memory_order_relaxed)) return CopyState::kCancelled;
  const bool limited = options.deadline != Deadline::max();
  if (limited && std::chrono::steady_clock::now() >= options.deadline) return CopyState::kDeadline;
  return CopyState::kRunning;
}

}  // namespace pd
