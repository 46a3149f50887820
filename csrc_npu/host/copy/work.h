// SPDX-License-Identifier: Apache-2.0
// A plan with everything that its execution needs, cut into chunks.
#pragma once

#include <cstdint>
#include <variant>

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
                   (options.stores == Stores::kAuto && plan.num_bytes() >= non_temporal_bytes())),
        walk_(choose_walk(plan, options)) {}

  std::uint64_t num_chunks() const {
    return std::visit([](const auto& walk) { return walk.num_chunks(); }, walk_);
  }

  void copy_chunk(std::uint64_t chunk) const {
    if (const auto* checked = std::get_if<CheckedWalk>(&walk_)) {
      checked->copy_chunk(chunk, streaming_);
    } else if (const auto* plain = std::get_if<PlanWalk>(&walk_)) {
      plain->copy_chunk(chunk, streaming_ ? kernel_.copy_streaming : kernel_.copy_temporal);
    }
  }

  // Makes this thread's chunks visible to whoever sees them counted as done.
  void fence() const {
    if (streaming_) kernel_.fence();
  }

 private:
  using Walk = std::variant<PlanWalk, CheckedWalk>;

  static Walk choose_walk(const CopyPlan& plan, const CopyOptions& options) {
    if (plan.checksums() == Checksums::kPerPair) return CheckedWalk(plan, options.checksums);
    require_places(plan, options.checksums);
    return PlanWalk(plan);
  }

  const Kernel& kernel_;
  bool streaming_;
  Walk walk_;
};

// Why a copy has to stop now, or kRunning. The clock is read only where there is a deadline.
inline CopyState reason_to_stop(const CopyOptions& options) {
  if (options.cancel != nullptr && options.cancel->load(std::memory_order_relaxed)) return CopyState::kCancelled;
  const bool limited = options.deadline != Deadline::max();
  if (limited && std::chrono::steady_clock::now() >= options.deadline) return CopyState::kDeadline;
  return CopyState::kRunning;
}

}  // namespace pd
