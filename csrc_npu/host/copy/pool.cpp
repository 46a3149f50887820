// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "job.h"

namespace pd {
namespace {

void require_usable(const std::vector<int>& cpus) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;  // more CPUs than the set holds: the kernel decides
  for (const int cpu : cpus) {
    if (cpu < 0 || cpu >= CPU_SETSIZE || !CPU_ISSET(static_cast<std::size_t>(cpu), &allowed)) {
      throw std::invalid_argument("copy threads: CPU " + std::to_string(cpu) + " is not one of this process's");
    }
  }
}

void pin_this_thread(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  cpu_set_t wanted;
  CPU_ZERO(&wanted);
  for (const int cpu : cpus) CPU_SET(static_cast<std::size_t>(cpu), &wanted);
  pthread_setaffinity_np(pthread_self(), sizeof wanted, &wanted);  // checked before; a CPU that went since is no error
}

}  // namespace

struct CopyPool::Impl {
  std::vector<int> cpus;
  std::mutex mutex;  // guards jobs and is_closing
  std::condition_variable changed;
  std::deque<std::shared_ptr<SharedCopy>> jobs;  // with chunks that nobody took yet, perhaps
  bool is_closing = false;
  std::vector<std::thread> threads;

  void run() {
    pthread_setname_np(pthread_self(), "pd-copy");
    pin_this_thread(cpus);
    while (const std::shared_ptr<SharedCopy> job = wait_for_job()) {
      job->help(Deadline::max());
      drop(job);
    }
  }

  std::shared_ptr<SharedCopy> wait_for_job() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return is_closing || !jobs.empty(); });
    return is_closing ? nullptr : jobs.front();
  }

  void drop(const std::shared_ptr<SharedCopy>& job) {
    const std::lock_guard lock(mutex);
    const auto place = std::find(jobs.begin(), jobs.end(), job);
    if (place != jobs.end()) jobs.erase(place);
  }

  void close() {
    std::deque<std::shared_ptr<SharedCopy>> left;
    {
      const std::lock_guard lock(mutex);
      is_closing = true;
      left.swap(jobs);
    }
    changed.notify_all();
    for (const auto& job : left) job->cancel();
    for (std::thread& thread : threads) thread.join();
  }
};

CopyPool::CopyPool(unsigned num_threads, std::vector<int> cpus) : impl_(std::make_unique<Impl>()) {
  require_usable(cpus);
  impl_->cpus = std::move(cpus);
  try {
    for (unsigned i = 0; i < num_threads; ++i) impl_->threads.emplace_back([this] { impl_->run(); });
  } catch (...) {
    impl_->close();
    throw;
  }
}

CopyPool::~CopyPool() { impl_->close(); }

unsigned CopyPool::num_threads() const { return static_cast<unsigned>(impl_->threads.size()); }

std::shared_ptr<CopyJob> CopyPool::submit(std::shared_ptr<const CopyPlan> plan, const CopyOptions& options) {
  auto job = std::make_shared<SharedCopy>(std::move(plan), options);
  if (impl_->threads.empty() || job->poll() != CopyState::kRunning) return job;
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->jobs.push_back(job);
  }
  impl_->changed.notify_all();
  return job;
}

}  // namespace pd
