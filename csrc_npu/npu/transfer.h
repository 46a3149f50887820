// SPDX-License-Identifier: Apache-2.0
// One extract or inject: one task in torch_npu's queue, in it one launch (or the merged copies) and one event.
//
// Threads: callers submit from any thread, the task runs on torch_npu's queue thread, nobody waits for the device.
// What a transfer needs (staging, the uploaded block ids) is kept alive until its event is seen to have passed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kernel.h"
#include "table.h"

namespace pd::npu {

// Staging and the block ids on the device. `keep` holds whatever owns the memory.
struct Buffers {
  std::uint64_t staging = 0;
  std::uint64_t staging_bytes = 0;
  std::uint64_t device_rows = 0;       // with a kernel: the table's rows, uploaded
  std::uint64_t host_block_ids = 0;    // with a kernel: int32, page-locked
  std::uint64_t device_block_ids = 0;  // with a kernel: room for them
  std::shared_ptr<void> keep;
};

// The completion of a transfer. Shared by the caller, the queued task and the list of what is kept alive.
class Event : public std::enable_shared_from_this<Event> {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  bool query();             // never blocks; throws std::runtime_error when the transfer failed
  void synchronize();       // blocks this thread until the device is done
  void wait(void* stream);  // makes a stream wait, in queue order; never blocks

 private:
  friend class Transfer;
  bool is_over();
  void throw_if_failed();
  void report(int error);  // by the queued task, after the event was recorded

  std::mutex mutex_;
  std::condition_variable changed_;
  void* event_ = nullptr;  // aclrtEvent
  bool reported_ = false;
  int error_ = 0;
  std::shared_ptr<void> keep_;
};

// Submits transfers of one table. With a kernel where one is given, else with merged copies.
class Transfer {
 public:
  Transfer(std::shared_ptr<const Table> table, std::shared_ptr<const Kernel> kernel);

  bool uses_kernel() const { return kernel_ != nullptr; }
  std::shared_ptr<Event> submit(Direction direction, std::span<const std::int64_t> block_ids, Buffers buffers,
                                void* stream) const;

  // Drops what finished transfers kept alive; returns how many are unfinished. submit() does it too.
  static std::size_t collect();

 private:
  std::shared_ptr<const Table> table_;
  std::shared_ptr<const Kernel> kernel_;
  std::shared_ptr<std::atomic<bool>> has_rows_;  // whether the runtime takes two-dimensional copies
};

// Test-only breakage; compiled in with PD_NPU_DEFECTS, otherwise set_defects() throws.
enum Defect : unsigned { kNoKeepAlive = 1, kOvertakeQueue = 2, kNoEvent = 4, kHostSync = 8 };
void set_defects(unsigned defects);

}  // namespace pd::npu
