// SPDX-License-Identifier: Apache-2.0
// Executes copy plans on host memory: one call for the whole plan, in the caller's thread or on worker threads.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pd/copy_plan.h"

namespace pd {

enum class Stores : int { kAuto = 0, kTemporal = 1, kNonTemporal = 2 };  // auto: by the plan's bytes
enum class CopyState : int { kRunning = 0, kDone = 1, kCancelled = 2, kDeadline = 3 };

using Deadline = std::chrono::steady_clock::time_point;

struct CopyOptions {
  Stores stores = Stores::kAuto;
  Deadline deadline = Deadline::max();
  const std::atomic<bool>* cancel = nullptr;  // looked at between chunks
  // Of a plan with Checksums::kPerPair: num_pairs() places for the checksums of the bytes that were written. Others
  // leave it empty. Valid until the copy is done.
  std::span<std::uint32_t> checksums = {};
};

// In the caller's thread. Returns kDone, kCancelled or kDeadline; bytes of a copy that is not done are undefined.
// Throws std::invalid_argument when `checksums` do not fit the plan.
CopyState execute(const CopyPlan& plan, const CopyOptions& options = {});

// The checksums of a plan with Checksums::kPerPair over the source's bytes as they are now (or the destination's):
// what the other end of the wire compares. Copies nothing. Throws std::invalid_argument as execute() does.
enum class Side : int { kSource = 0, kDestination = 1 };
void checksum(const CopyPlan& plan, Side side, std::span<std::uint32_t> checksums);

class CopyJob;

// Worker threads, which may run on `cpus` only (empty: on all that the process may). Zero threads: every job runs in
// the thread that waits. Throws std::invalid_argument for CPUs that this process may not use, std::system_error when
// a thread cannot be started.
class CopyPool {
 public:
  CopyPool(unsigned num_threads, std::vector<int> cpus);
  ~CopyPool();  // cancels what is queued, waits for what runs
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  // Returns at once; the plan is shared with the job.
  std::shared_ptr<CopyJob> submit(std::shared_ptr<const CopyPlan> plan, const CopyOptions& options = {});

  unsigned num_threads() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class CopyJob {
 public:
  virtual ~CopyJob() = default;
  virtual CopyState poll() = 0;                // never blocks
  virtual CopyState wait(Deadline until) = 0;  // helps to copy; kRunning when `until` passed first
  virtual void cancel() = 0;  // takes effect between chunks; wait() says when nothing is touched any more
};

// Which kernels run here: "avx512", "avx2", "neon" or "portable"; PD_COPY_KERNEL forces one that the CPU has. Throws
// std::invalid_argument for one that it has not.
std::string kernel_name();

// From how many bytes on a plan is copied with non-temporal stores: PD_COPY_NONTEMPORAL_BYTES, or by default
// kNonTemporalBytes.
inline constexpr std::uint64_t kNonTemporalBytes = 4u << 20;
std::uint64_t non_temporal_bytes();

}  // namespace pd
