// SPDX-License-Identifier: Apache-2.0
// A team of threads that copies a list of pieces: the limit that every mover of bytes is compared with.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bench_api.h"
#include "kernels.h"

namespace pd::bench {
namespace {

constexpr std::uint64_t kShareBytes = 512 << 10;  // what a thread takes at a time

struct Work {
  const Kernel* kernel = nullptr;
  std::uint64_t count = 0;
  std::uint64_t bytes = 0;
  const std::uint64_t* destinations = nullptr;
  const std::uint64_t* sources = nullptr;
};

class Team {
 public:
  explicit Team(unsigned num_threads) {
    for (unsigned index = 1; index < num_threads; ++index) threads_.emplace_back([this] { serve(); });
  }

  ~Team() {
    {
      const std::lock_guard lock(mutex_);
      is_ending_ = true;
    }
    started_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  void run(const Work& work) {
    {
      const std::lock_guard lock(mutex_);
      work_ = work;
      taken_.store(0, std::memory_order_relaxed);
      num_running_ = threads_.size();
      ++round_;
    }
    started_.notify_all();
    take_shares(work);
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return num_running_ == 0; });
  }

 private:
  void serve() {
    std::uint64_t seen = 0;
    while (true) {
      Work work;
      {
        std::unique_lock lock(mutex_);
        started_.wait(lock, [&] { return is_ending_ || round_ != seen; });
        if (is_ending_) return;
        seen = round_;
        work = work_;
      }
      take_shares(work);
      const std::lock_guard lock(mutex_);
      if (--num_running_ == 0) ended_.notify_one();
    }
  }

  void take_shares(const Work& work) {
    const std::uint64_t share = std::max<std::uint64_t>(1, kShareBytes / work.bytes);
    while (true) {
      const std::uint64_t start = taken_.fetch_add(share, std::memory_order_relaxed);
      if (start >= work.count) break;
      const std::uint64_t stop = std::min(start + share, work.count);
      for (std::uint64_t index = start; index < stop; ++index) {
        const void* next = index + 1 < stop ? reinterpret_cast<const void*>(work.sources[index + 1]) : nullptr;
        work.kernel->copy(reinterpret_cast<void*>(work.destinations[index]),
                          reinterpret_cast<const void*>(work.sources[index]), work.bytes, next);
      }
    }
    work.kernel->finish();
  }

  std::mutex mutex_;  // guards what follows, except taken_
  std::condition_variable started_;
  std::condition_variable ended_;
  Work work_;
  std::uint64_t round_ = 0;
  std::size_t num_running_ = 0;
  bool is_ending_ = false;
  std::atomic<std::uint64_t> taken_{0};
  std::vector<std::thread> threads_;
};

}  // namespace
}  // namespace pd::bench

using pd::bench::kernels;
using pd::bench::Team;

const char* pd_bench_kernels() {
  static const std::string names = [] {
    std::string joined;
    for (const auto& kernel : kernels()) {
      if (!joined.empty()) joined.append(",");
      joined.append(kernel.name);
    }
    return joined;
  }();
  return names.c_str();
}

void* pd_bench_team_create(unsigned num_threads) {
  try {
    return std::make_unique<Team>(num_threads).release();
  } catch (const std::exception&) {
    return nullptr;
  }
}

void pd_bench_team_destroy(void* team) { std::unique_ptr<Team>(static_cast<Team*>(team)).reset(); }

double pd_bench_copy(void* team, int kernel, std::uint64_t count, std::uint64_t bytes,
                     const std::uint64_t* destinations, const std::uint64_t* sources) {
  const auto index = static_cast<std::size_t>(kernel);
  if (kernel < 0 || index >= kernels().size() || bytes == 0) return -1.0;
  const auto start = std::chrono::steady_clock::now();
  static_cast<Team*>(team)->run({&kernels()[index], count, bytes, destinations, sources});
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
