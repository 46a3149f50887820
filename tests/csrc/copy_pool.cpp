// SPDX-License-Identifier: Apache-2.0
// Jobs over worker threads: completion, help of waiters, cancellation, deadlines, and a pool that ends first.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "pd/copy_engine.h"
#include "testing.h"

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::uint64_t kBlock = 64u << 10;

// Blocks of one tensor in reverse order on the other side.
struct Scene {
  explicit Scene(std::int64_t num_blocks) : src(kBlock * static_cast<std::uint64_t>(num_blocks)), dst(src.size()) {
    for (std::size_t i = 0; i < src.size(); ++i) src[i] = static_cast<unsigned char>(i * 2654435761u >> 24);
    std::vector<std::int64_t> from, to;
    for (std::int64_t i = 0; i < num_blocks; ++i) from.push_back(i), to.push_back(num_blocks - 1 - i);
    const std::vector<std::uint64_t> src_tensors{reinterpret_cast<std::uint64_t>(src.data())};
    const std::vector<std::uint64_t> dst_tensors{reinterpret_cast<std::uint64_t>(dst.data())};
    const std::vector<pd::BlockSlice> slices{{0, 0, kBlock}};
    plan = std::make_shared<pd::CopyPlan>();
    plan->add({src_tensors, dst_tensors, kBlock, kBlock, from, to, slices});
  }

  bool is_copied() const {
    const std::size_t num_blocks = src.size() / kBlock;
    for (std::size_t i = 0; i < num_blocks; ++i) {
      if (std::memcmp(&src[i * kBlock], &dst[(num_blocks - 1 - i) * kBlock], kBlock) != 0) return false;
    }
    return true;
  }
  bool is_untouched() const {
    return std::all_of(dst.begin(), dst.end(), [](unsigned char byte) { return byte == 0; });
  }

  std::vector<unsigned char> src, dst;
  std::shared_ptr<pd::CopyPlan> plan;
};

pd::CopyState poll_until_settled(pd::CopyJob& job) {
  const auto end = Clock::now() + seconds(60);
  while (job.poll() == pd::CopyState::kRunning && Clock::now() < end) std::this_thread::yield();
  return job.poll();
}

}  // namespace

TEST(workers_finish_a_job_that_nobody_waits_for) {
  pd::CopyPool pool(2, {});
  for (int round = 0; round < 20; ++round) {
    Scene scene(40);
    const auto job = pool.submit(scene.plan);
    CHECK(poll_until_settled(*job) == pd::CopyState::kDone);
    CHECK(scene.is_copied());
  }
}

TEST(without_workers_the_waiter_copies) {
  pd::CopyPool pool(0, {});
  Scene scene(40);
  const auto job = pool.submit(scene.plan);
  CHECK(job->poll() == pd::CopyState::kRunning);
  CHECK(scene.is_untouched());
  CHECK(job->wait(pd::Deadline::max()) == pd::CopyState::kDone);
  CHECK(scene.is_copied());
}

TEST(many_jobs_from_many_threads_are_each_copied_once) {
  pd::CopyPool pool(3, {});
  std::atomic<int> num_good{0};
  std::vector<std::thread> callers;
  callers.reserve(4);
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 8; ++round) {
        Scene first(12), second(3);
        const auto one = pool.submit(first.plan), two = pool.submit(second.plan);
        const bool done = two->wait(pd::Deadline::max()) == pd::CopyState::kDone &&
                          one->wait(Clock::now() + seconds(60)) == pd::CopyState::kDone;
        if (done && first.is_copied() && second.is_copied()) ++num_good;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK_EQUAL(num_good.load(), 32);
}

TEST(two_waiters_see_the_same_end) {
  pd::CopyPool pool(0, {});
  Scene scene(64);
  const auto job = pool.submit(scene.plan);
  pd::CopyState other = pd::CopyState::kRunning;
  std::thread waiter([&] { other = job->wait(pd::Deadline::max()); });
  const pd::CopyState mine = job->wait(pd::Deadline::max());
  waiter.join();
  CHECK(mine == pd::CopyState::kDone && other == pd::CopyState::kDone);
  CHECK(scene.is_copied());
}

TEST(a_cancelled_job_touches_nothing_after_it_settled) {
  pd::CopyPool pool(2, {});
  for (int round = 0; round < 50; ++round) {
    Scene scene(48);
    const auto job = pool.submit(scene.plan);
    job->cancel();
    const pd::CopyState state = job->wait(pd::Deadline::max());
    CHECK(state == pd::CopyState::kCancelled || (state == pd::CopyState::kDone && scene.is_copied()));
    std::fill(scene.dst.begin(), scene.dst.end(), 0);  // a late writer would be a race, or show here
    CHECK(scene.is_untouched());
    CHECK(job->poll() == state);
  }
}

TEST(cancelled_before_anybody_copied_it_is_settled_at_once) {
  pd::CopyPool pool(0, {});
  Scene scene(8);
  const auto job = pool.submit(scene.plan);
  job->cancel();
  CHECK(job->poll() == pd::CopyState::kCancelled);
  CHECK(job->wait(pd::Deadline::max()) == pd::CopyState::kCancelled);
  CHECK(scene.is_untouched());
}

TEST(a_deadline_ends_a_job_that_nobody_copies) {
  pd::CopyPool pool(0, {});
  Scene scene(8);
  pd::CopyOptions options;
  options.deadline = Clock::now() + milliseconds(5);
  const auto job = pool.submit(scene.plan, options);
  CHECK(poll_until_settled(*job) == pd::CopyState::kDeadline);
  CHECK(job->wait(pd::Deadline::max()) == pd::CopyState::kDeadline);
  CHECK(scene.is_untouched());
}

TEST(a_wait_that_is_over_leaves_the_job_running) {
  pd::CopyPool pool(0, {});
  Scene scene(8);
  const auto job = pool.submit(scene.plan);
  CHECK(job->wait(Clock::now()) == pd::CopyState::kRunning);
  CHECK(scene.is_untouched());
  CHECK(job->wait(pd::Deadline::max()) == pd::CopyState::kDone);
}

TEST(the_flag_of_the_caller_cancels) {
  pd::CopyPool pool(1, {});
  Scene scene(8);
  const std::atomic<bool> cancelled{true};
  pd::CopyOptions options;
  options.cancel = &cancelled;
  CHECK(pool.submit(scene.plan, options)->wait(pd::Deadline::max()) == pd::CopyState::kCancelled);
  CHECK(scene.is_untouched());
}

TEST(a_pool_that_ends_cancels_what_is_queued) {
  Scene large(200), queued(8);
  std::shared_ptr<pd::CopyJob> first, second;
  {
    pd::CopyPool pool(1, {});
    first = pool.submit(large.plan);
    second = pool.submit(queued.plan);
  }
  for (const auto& job : {first, second}) CHECK(job->poll() != pd::CopyState::kRunning);
  CHECK(second->poll() == pd::CopyState::kCancelled ? true : queued.is_copied());
}

TEST(the_plan_lives_as_long_as_its_job) {
  pd::CopyPool pool(1, {});
  Scene scene(30);
  const std::weak_ptr<pd::CopyPlan> watch = scene.plan;
  auto job = pool.submit(scene.plan);
  scene.plan.reset();
  CHECK(job->wait(pd::Deadline::max()) == pd::CopyState::kDone);
  CHECK(scene.is_copied());
  job.reset();
  const auto end = Clock::now() + seconds(60);
  while (!watch.expired() && Clock::now() < end) std::this_thread::yield();  // the worker lets go of it, too
  CHECK(watch.expired());
}

TEST(checksums_come_from_workers_as_well) {
  pd::CopyPool pool(3, {});
  std::vector<unsigned char> src(40 * kBlock, 3), dst(src.size());
  for (std::size_t i = 0; i < src.size(); i += 97) src[i] = static_cast<unsigned char>(i);
  std::vector<std::int64_t> ids(40);
  std::iota(ids.begin(), ids.end(), 0);
  const std::vector<std::uint64_t> from{reinterpret_cast<std::uint64_t>(src.data())};
  const std::vector<std::uint64_t> to{reinterpret_cast<std::uint64_t>(dst.data())};
  const std::vector<pd::BlockSlice> slices{{0, 0, kBlock}};
  const auto plan = std::make_shared<pd::CopyPlan>(pd::Checksums::kPerPair);
  plan->add({from, to, kBlock, kBlock, ids, ids, slices});
  std::vector<std::uint32_t> wanted(40), copied(40);
  pd::checksum(*plan, pd::Side::kSource, wanted);
  pd::CopyOptions options;
  options.checksums = copied;
  CHECK(pool.submit(plan, options)->wait(pd::Deadline::max()) == pd::CopyState::kDone);
  CHECK(copied == wanted);
  CHECK(src == dst);
}

TEST(threads_run_on_the_cpus_that_were_asked_for) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  CHECK_EQUAL(sched_getaffinity(0, sizeof allowed, &allowed), 0);
  int first = 0;
  while (!CPU_ISSET(static_cast<std::size_t>(first), &allowed)) ++first;
  pd::CopyPool pool(2, {first});
  Scene scene(20);
  CHECK(poll_until_settled(*pool.submit(scene.plan)) == pd::CopyState::kDone);
  int missing = 0;
  while (missing < CPU_SETSIZE && CPU_ISSET(static_cast<std::size_t>(missing), &allowed)) ++missing;
  CHECK_THROWS(std::invalid_argument, "is not one of this process's", pd::CopyPool(1, {missing}));
  CHECK_THROWS(std::invalid_argument, "CPU -1", pd::CopyPool(1, {-1}));
}
