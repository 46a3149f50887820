// SPDX-License-Identifier: Apache-2.0
#include "job.h"

#include <utility>

namespace pd {

SharedCopy::SharedCopy(std::shared_ptr<const CopyPlan> plan, const CopyOptions& options)
    : plan_(std::move(plan)), options_(options), work_(*plan_, options), num_chunks_(work_.num_chunks()) {
  if (num_chunks_ == 0) state_ = CopyState::kDone;
}

void SharedCopy::stop(CopyState reason) {
  CopyState none = CopyState::kRunning;
  stop_reason_.compare_exchange_strong(none, reason);
}

// All operations on num_inside_, stop_reason_ and next_chunk_ are sequentially consistent: whoever joins after the
// last one left sees the reason to stop, or that no chunk is left, and so touches nothing.
void SharedCopy::help(Deadline until) {
  num_inside_.fetch_add(1);
  while (stop_reason_.load() == CopyState::kRunning) {
    const CopyState reason = reason_to_stop(options_);
    if (reason != CopyState::kRunning) {
      stop(reason);
      break;
    }
    if (until != Deadline::max() && std::chrono::steady_clock::now() >= until) break;
    const std::uint64_t chunk = next_chunk_.fetch_add(1);
    if (chunk >= num_chunks_) break;
    work_.copy_chunk(chunk);
    work_.fence();
    num_done_.fetch_add(1);
  }
  leave();
}

void SharedCopy::leave() {
  const bool is_last = num_inside_.fetch_sub(1) == 1;
  if (!is_last || (next_chunk_.load() < num_chunks_ && stop_reason_.load() == CopyState::kRunning)) return;
  const std::lock_guard lock(mutex_);
  if (state() != CopyState::kRunning || num_inside_.load() != 0) return;  // settled, or somebody who joined settles it
  const bool complete = num_done_.load() == num_chunks_;
  state_.store(complete ? CopyState::kDone : stop_reason_.load(), std::memory_order_release);
  settled_.notify_all();
}

CopyState SharedCopy::poll() {
  if (state() != CopyState::kRunning) return state();
  const CopyState reason = reason_to_stop(options_);
  if (reason == CopyState::kRunning) return reason;
  num_inside_.fetch_add(1);
  stop(reason);
  leave();
  return state();
}

void SharedCopy::cancel() {
  num_inside_.fetch_add(1);
  stop(CopyState::kCancelled);
  leave();
}

CopyState SharedCopy::wait(Deadline until) {
  if (state() == CopyState::kRunning) help(until);
  std::unique_lock lock(mutex_);
  const auto is_settled = [this] { return state() != CopyState::kRunning; };
  if (until == Deadline::max()) {
    settled_.wait(lock, is_settled);
  } else {
    settled_.wait_until(lock, until, is_settled);
  }
  return state();
}

}  // namespace pd
