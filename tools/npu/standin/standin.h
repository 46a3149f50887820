// SPDX-License-Identifier: Apache-2.0
// A host-memory stand-in for libascendcl, for tests without an NPU: what its files share.
//
// Streams are threads that run their tasks in order, events are real, fresh and freed memory is poisoned, and what
// would make the host wait is counted. Nothing here says anything about an NPU's speed.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "acl/acl.h"
#include "acl/acl_rt.h"

namespace standin {

inline constexpr aclError kOk = 0;
inline constexpr aclError kInvalid = 100000;       // ACL_ERROR_INVALID_PARAM
inline constexpr aclError kNotSupported = 207000;  // ACL_ERROR_RT_FEATURE_NOT_SUPPORT
inline constexpr aclError kOutOfMemory = 207001;   // ACL_ERROR_RT_MEMORY_ALLOCATION
inline constexpr unsigned char kFreshByte = 0xA5;  // never written
inline constexpr unsigned char kFreedByte = 0xDE;  // given back
inline constexpr std::size_t kDeviceBytes = std::size_t{8} << 30;

// Indexes are the ABI of pd_acl_counter(); append only.
enum Counter : int {
  kHostSyncs,      // calls that make the host wait: synchronize*, synchronous copies and sets
  kCopies,         // asynchronous copies posted
  kCopies2d,       // of them two-dimensional
  kLaunches,       // kernels launched
  kEventRecords,   // events recorded
  kEventWaits,     // streams made to wait for an event
  kUseAfterFree,   // copies that touched device memory that was given back
  kOutOfBounds,    // copies that began in device memory and ran over its end
  kUnimplemented,  // calls of functions that the stand-in lacks
  kTasksPosted,    // to any stream
  kTasksDone,
  kNumCounters,
};
void count(Counter counter);

// One stream: a thread that runs what was posted, in order. While it is held, it starts nothing: as slow as can be.
class Stream {
 public:
  explicit Stream(std::int32_t id);
  ~Stream();  // runs what is posted, then ends
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  std::int32_t id() const { return id_; }
  void post(std::function<void()> task);
  void wait_idle();
  bool is_idle();
  void hold(bool held);

 private:
  void run();

  const std::int32_t id_;
  std::mutex mutex_;
  std::condition_variable posted_, idle_;
  std::deque<std::function<void()>> tasks_;
  std::size_t pending_ = 0;
  bool stopping_ = false;
  bool held_ = false;
  std::thread thread_;
};

Stream& resolve(aclrtStream stream);  // null: the default stream

// One recording of an event; a later recording makes a new one, waits keep what they saw.
class Mark {
 public:
  void set();
  void wait();
  bool is_set();
  std::chrono::steady_clock::time_point time();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
  std::chrono::steady_clock::time_point at_;
};

// Called by a copy when it runs: counts accesses to freed device memory and overruns.
void check_access(const void* address, std::size_t bytes);
bool is_device(const void* address);

}  // namespace standin
