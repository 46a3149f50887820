// SPDX-License-Identifier: Apache-2.0
// One vector core of an NPU as this machine plays it: a scalar thread (the caller), three pipes with a thread each, the
// counted flags between them, and the unified buffer. It models order and addresses, never speed.
#ifndef PD_NPU_TRITON_CORE_H_
#define PD_NPU_TRITON_CORE_H_

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "launch.h"

namespace pd::npu_sim {

// The numbers that the rewritten kernel passes.
enum PipeId : std::int64_t { kScalar = 0, kVector = 1, kLoad = 4, kStore = 5, kAllPipes = 6 };

constexpr std::size_t kNumPipes = 8;
constexpr std::size_t kNumEvents = 8;
constexpr std::size_t kBufferBytes = 192 * 1024;
constexpr std::size_t kBufferAlign = 32;
constexpr std::uint8_t kPoison = 0xCD;

// Flags count: a set adds one, a wait takes one away. What is left at the end is a wait that is missing.
class Flags {
 public:
  explicit Flags(std::chrono::milliseconds timeout) : timeout_(timeout) {}
  void set(std::size_t source, std::size_t target, std::size_t event);
  // False when none came in time: a deadlock, were it hardware.
  bool wait(std::size_t source, std::size_t target, std::size_t event);
  std::int64_t count_left();

 private:
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<std::array<std::array<std::int64_t, kNumEvents>, kNumPipes>, kNumPipes> counts_{};
};

// Runs what it is given in order, on its own thread.
class Pipe {
 public:
  Pipe(std::uint32_t seed, std::uint32_t random_us, std::uint32_t fixed_us);
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe();

  void push(std::function<void()> work);
  void drain();
  // Called by the work itself: takes the time that a transfer might take.
  void linger();

 private:
  void run();

  std::minstd_rand random_;
  std::uint32_t random_us_;
  std::uint32_t fixed_us_;
  std::mutex mutex_;
  std::condition_variable filled_;
  std::condition_variable idle_;
  std::deque<std::function<void()>> queue_;
  std::size_t pending_ = 0;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

class Core {
 public:
  Core(const SimOptions& options, std::uint32_t program);

  [[nodiscard]] std::uint32_t program() const { return program_; }
  [[nodiscard]] std::uint8_t* buffer() { return buffer_; }
  // The pipe's thread, or null where a pipe is played by the scalar thread.
  [[nodiscard]] Pipe* find_pipe(std::int64_t id);
  void set_flag(std::int64_t source, std::int64_t target, std::int64_t event);
  void wait_flag(std::int64_t source, std::int64_t target, std::int64_t event);
  void drain();
  // Counts an access that leaves the buffer, or starts where a transfer cannot; false: do not make it.
  bool check_buffer(const void* start, std::size_t bytes);
  void count_load(std::size_t bytes);
  void count_store(std::size_t bytes);
  // After the kernel returned and the pipes drained.
  void add_to(SimStats& total);

 private:
  std::uint32_t program_;
  std::vector<std::uint8_t> memory_;
  std::uint8_t* buffer_;
  Flags flags_;
  std::atomic<std::int64_t> deadlocks_{0};
  SimStats stats_{};
  std::array<std::unique_ptr<Pipe>, kNumPipes> pipes_;  // last: their work uses the rest
};

// The core whose kernel runs on this thread.
Core& get_core();
void set_core(Core* core);

}  // namespace pd::npu_sim

#endif  // PD_NPU_TRITON_CORE_H_
