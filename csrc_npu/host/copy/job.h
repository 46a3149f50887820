// SPDX-License-Identifier: Apache-2.0
// One copy that several threads work on. Threads join and leave; the last to leave settles how it ended.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "pd/copy_engine.h"
#include "work.h"

namespace pd {

class SharedCopy final : public CopyJob {
 public:
  SharedCopy(std::shared_ptr<const CopyPlan> plan, const CopyOptions& options);

  CopyState poll() override;
  CopyState wait(Deadline until) override;
  void cancel() override;

  // Copies chunks until there are none left, the copy has to stop, or `until` passed. Any thread.
  void help(Deadline until);

 private:
  void stop(CopyState reason);
  void leave();
  CopyState state() const { return state_.load(std::memory_order_acquire); }

  std::shared_ptr<const CopyPlan> plan_;  // what work_ refers to
  CopyOptions options_;
  CopyWork work_;
  std::uint64_t num_chunks_;
  std::atomic<std::uint64_t> next_chunk_{0};
  std::atomic<std::uint64_t> num_done_{0};
  std::atomic<std::uint32_t> num_inside_{0};                 // threads between joining and leaving
  std::atomic<CopyState> stop_reason_{CopyState::kRunning};  // the first reason stays
  std::atomic<CopyState> state_{CopyState::kRunning};        // settled once
  std::mutex mutex_;                                         // guards the step of state_ that waiters wait for
  std::condition_variable settled_;
};

}  // namespace pd
