// SPDX-License-Identifier: Apache-2.0
#include "core.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace pd::npu_sim {

namespace {

constexpr std::uint32_t kSlowFactor = 8;
thread_local Core* current_core = nullptr;

std::size_t check_index(std::int64_t value, std::size_t limit, const char* what) {
  if (value < 0 || value >= static_cast<std::int64_t>(limit)) {
    std::fprintf(stderr, "pd_sim: %s %lld is not in 0..%zu\n", what, static_cast<long long>(value), limit - 1);
    std::abort();
  }
  return static_cast<std::size_t>(value);
}

}  // namespace

Core& get_core() { return *current_core; }
void set_core(Core* core) { current_core = core; }

void Flags::set(std::size_t source, std::size_t target, std::size_t event) {
  const std::lock_guard lock(mutex_);
  ++counts_[source][target][event];
  changed_.notify_all();
}

bool Flags::wait(std::size_t source, std::size_t target, std::size_t event) {
  std::unique_lock lock(mutex_);
  auto& count = counts_[source][target][event];
  if (!changed_.wait_for(lock, timeout_, [&] { return count > 0; })) return false;
  --count;
  return true;
}

std::int64_t Flags::count_left() {
  const std::lock_guard lock(mutex_);
  std::int64_t left = 0;
  for (const auto& targets : counts_) {
    for (const auto& events : targets) {
      for (const auto count : events) left += count;
    }
  }
  return left;
}

Pipe::Pipe(std::uint32_t seed, std::uint32_t random_us, std::uint32_t fixed_us)
    : random_(seed), random_us_(random_us), fixed_us_(fixed_us), thread_([this] { run(); }) {}

Pipe::~Pipe() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    filled_.notify_all();
  }
  thread_.join();
}

void Pipe::push(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(work));
  ++pending_;
  filled_.notify_one();
}

void Pipe::drain() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [&] { return pending_ == 0; });
}

void Pipe::linger() {
  const std::uint32_t us = fixed_us_ + (random_us_ != 0 ? static_cast<std::uint32_t>(random_() % random_us_) : 0);
  if (us != 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

void Pipe::run() {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      filled_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    work();
    const std::lock_guard lock(mutex_);
    if (--pending_ == 0) idle_.notify_all();
  }
}

Core::Core(const SimOptions& options, std::uint32_t program)
    : program_(program),
      memory_(kBufferBytes + kBufferAlign, kPoison),
      flags_(std::chrono::milliseconds(options.flag_timeout_ms)) {
  const auto start = reinterpret_cast<std::uintptr_t>(memory_.data());
  buffer_ = memory_.data() + (kBufferAlign - start % kBufferAlign) % kBufferAlign;
  for (const std::int64_t id : {kVector, kLoad, kStore}) {
    const auto at = static_cast<std::size_t>(id);
    const std::uint32_t fixed = options.slow_pipe == id ? kSlowFactor * options.delay_us : 0;
    const std::uint32_t seed = options.seed * 1009 + program * kNumPipes + static_cast<std::uint32_t>(id) + 1;
    pipes_[at] = std::make_unique<Pipe>(seed, options.delay_us, fixed);
  }
}

Pipe* Core::find_pipe(std::int64_t id) { return pipes_[check_index(id, kNumPipes, "pipe")].get(); }

void Core::set_flag(std::int64_t source, std::int64_t target, std::int64_t event) {
  const auto from = check_index(source, kNumPipes, "pipe"), to = check_index(target, kNumPipes, "pipe");
  const auto number = check_index(event, kNumEvents, "event");
  auto work = [this, from, to, number] { flags_.set(from, to, number); };
  if (Pipe* pipe = find_pipe(source)) {
    pipe->push(work);
  } else {
    work();
  }
}

void Core::wait_flag(std::int64_t source, std::int64_t target, std::int64_t event) {
  const auto from = check_index(source, kNumPipes, "pipe"), to = check_index(target, kNumPipes, "pipe");
  const auto number = check_index(event, kNumEvents, "event");
  auto work = [this, from, to, number] {
    if (!flags_.wait(from, to, number)) ++deadlocks_;
  };
  if (Pipe* pipe = find_pipe(target)) {
    pipe->push(work);
  } else {
    work();
  }
}

void Core::drain() {
  for (auto& pipe : pipes_) {
    if (pipe) pipe->drain();
  }
}

bool Core::check_buffer(const void* start, std::size_t bytes) {
  const auto at = reinterpret_cast<std::uintptr_t>(start), begin = reinterpret_cast<std::uintptr_t>(buffer_);
  if (at < begin || at + bytes > begin + kBufferBytes) {
    ++stats_.overruns;
    return false;
  }
  if (at % kBufferAlign != 0) ++stats_.misaligned;
  return true;
}

void Core::count_load(std::size_t bytes) {
  ++stats_.loads;
  stats_.bytes_loaded += static_cast<std::int64_t>(bytes);
}

void Core::count_store(std::size_t bytes) {
  ++stats_.stores;
  stats_.bytes_stored += static_cast<std::int64_t>(bytes);
}

void Core::add_to(SimStats& total) {
  total.loads += stats_.loads;
  total.stores += stats_.stores;
  total.bytes_loaded += stats_.bytes_loaded;
  total.bytes_stored += stats_.bytes_stored;
  total.flags_left += flags_.count_left();
  total.deadlocks += deadlocks_;
  total.overruns += stats_.overruns;
  total.misaligned += stats_.misaligned;
}

}  // namespace pd::npu_sim
