// SPDX-License-Identifier: Apache-2.0
// Copies: plans, execution, pools and jobs.
#include <chrono>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "errors.h"
#include "handles.h"
#include "pd/c_api.h"
#include "pd/check.h"
#include "pd/copy_engine.h"
#include "pd/crc32c.h"

struct pd_plan {
  std::shared_ptr<pd::CopyPlan> plan;
};

struct pd_job {
  std::shared_ptr<pd::CopyJob> job;
};

namespace {

using pd::bind::guarded;

static_assert(sizeof(pd::BlockSlice) == 6 * sizeof(std::int64_t), "a slice is six words");

std::span<const std::int64_t> as_span(const std::int64_t* values, std::uint64_t count) {
  return values == nullptr ? std::span<const std::int64_t>{} : std::span<const std::int64_t>{values, count};
}

// Of `pairs` all but the blocks.
pd::BlockPairs read_group(const pd_block_pairs* pairs, std::vector<pd::BlockSlice>& slices) {
  pd::require(pairs != nullptr, "no block pairs");
  pd::require(pairs->num_tensors == 0 || (pairs->src_tensors != nullptr && pairs->dst_tensors != nullptr),
              "tensors without addresses");
  pd::require(pairs->num_slices == 0 || pairs->slices != nullptr, "slices without an array");
  slices.reserve(pairs->num_slices);
  for (std::uint64_t i = 0; i < pairs->num_slices; ++i) {
    const std::int64_t* words = pairs->slices + 6 * i;
    pd::require((words[0] | words[1] | words[2] | words[3]) >= 0, "a slice with a negative offset, size or count");
    slices.push_back({static_cast<std::uint64_t>(words[0]), static_cast<std::uint64_t>(words[1]),
                      static_cast<std::uint64_t>(words[2]), static_cast<std::uint64_t>(words[3]), words[4], words[5]});
  }
  pd::BlockPairs group;
  group.src_tensors = {pairs->src_tensors, pairs->num_tensors};
  group.dst_tensors = {pairs->dst_tensors, pairs->num_tensors};
  group.src_block_stride = pairs->src_block_stride;
  group.dst_block_stride = pairs->dst_block_stride;
  group.slices = slices;
  return group;
}

void set_blocks(pd::BlockPairs& group, std::uint64_t count, const std::int64_t* src, const std::int64_t* dst) {
  pd::require(count == 0 || (src != nullptr && dst != nullptr), "blocks without ids");
  group.src_blocks = as_span(src, count);
  group.dst_blocks = as_span(dst, count);
}

void add_pairs(pd::CopyPlan& plan, const pd_block_pairs* pairs) {
  std::vector<pd::BlockSlice> slices;
  pd::BlockPairs group = read_group(pairs, slices);
  set_blocks(group, pairs->num_blocks, pairs->src_blocks, pairs->dst_blocks);
  group.src_shifts = as_span(pairs->src_shifts, pairs->num_blocks);
  group.dst_shifts = as_span(pairs->dst_shifts, pairs->num_blocks);
  plan.add(group);
}

pd::Deadline to_deadline(std::int64_t timeout_ms) {
  if (timeout_ms < 0) return pd::Deadline::max();
  const auto now = std::chrono::steady_clock::now();
  const auto longest = std::chrono::duration_cast<std::chrono::milliseconds>(pd::Deadline::max() - now);
  return timeout_ms >= longest.count() ? pd::Deadline::max() : now + std::chrono::milliseconds(timeout_ms);
}

pd::CopyOptions to_options(int stores, std::int64_t timeout_ms) {
  pd::require(stores >= 0 && stores <= 2, "stores must be 0 (auto), 1 (temporal) or 2 (non-temporal)");
  pd::CopyOptions options;
  options.stores = static_cast<pd::Stores>(stores);
  options.deadline = to_deadline(timeout_ms);
  return options;
}

const pd::CopyPlan& to_plan(const pd_plan* plan) {
  pd::require(plan != nullptr, "no plan");
  return *plan->plan;
}

}  // namespace

extern "C" {

const char* pd_kernel_name(void) {
  return guarded([] {
    static const std::string name = pd::kernel_name();
    return name.c_str();
  });
}

const char* pd_crc32c_name(void) {
  return guarded([] {
    static const std::string name = pd::crc32c_name();
    return name.c_str();
  });
}

uint32_t pd_crc32c(uint32_t crc, const void* data, uint64_t bytes) { return pd::crc32c(crc, data, bytes); }

pd_plan* pd_plan_create(int with_checksums) {
  return guarded([&] {
    const auto checksums = with_checksums != 0 ? pd::Checksums::kPerPair : pd::Checksums::kNone;
    return new pd_plan{std::make_shared<pd::CopyPlan>(checksums)};
  });
}

int pd_plan_add(pd_plan* plan, const pd_block_pairs* pairs) {
  return guarded([&] {
    pd::require(plan != nullptr, "no plan");
    add_pairs(*plan->plan, pairs);
    return 0;
  });
}

void pd_plan_free(pd_plan* plan) { delete plan; }

uint64_t pd_plan_num_bytes(const pd_plan* plan) { return plan->plan->num_bytes(); }
uint64_t pd_plan_num_pieces(const pd_plan* plan) { return plan->plan->num_pieces(); }
uint64_t pd_plan_num_runs(const pd_plan* plan) { return plan->plan->num_runs(); }
uint64_t pd_plan_num_pairs(const pd_plan* plan) { return plan->plan->num_pairs(); }

int pd_execute(const pd_plan* plan, int stores, int64_t timeout_ms, uint32_t* checksums, uint64_t num_checksums) {
  return guarded([&] {
    pd::CopyOptions options = to_options(stores, timeout_ms);
    options.checksums = {checksums, num_checksums};
    return static_cast<int>(pd::execute(to_plan(plan), options));
  });
}

int pd_checksum(const pd_plan* plan, int side, uint32_t* checksums, uint64_t num_checksums) {
  return guarded([&] {
    pd::require(side == 0 || side == 1, "side must be 0 (source) or 1 (destination)");
    pd::checksum(to_plan(plan), static_cast<pd::Side>(side), {checksums, num_checksums});
    return 0;
  });
}

int pd_copy_blocks(const pd_block_pairs* pairs, int stores, int64_t timeout_ms) {
  return guarded([&] {
    const pd::CopyOptions options = to_options(stores, timeout_ms);
    pd::CopyPlan plan;
    add_pairs(plan, pairs);
    return static_cast<int>(pd::execute(plan, options));
  });
}

int pd_copy_groups(const pd_block_pairs* const* groups, uint64_t num_groups, uint64_t num_blocks,
                   const int64_t* src_blocks, const int64_t* dst_blocks, int stores, int64_t timeout_ms) {
  return guarded([&] {
    pd::require(num_groups == 0 || groups != nullptr, "groups without an array");
    const pd::CopyOptions options = to_options(stores, timeout_ms);
    pd::CopyPlan plan;
    std::vector<pd::BlockSlice> slices;
    for (uint64_t i = 0; i < num_groups; ++i) {
      slices.clear();
      pd::BlockPairs pairs = read_group(groups[i], slices);
      set_blocks(pairs, num_blocks, src_blocks, dst_blocks);
      plan.add(pairs);
    }
    return static_cast<int>(pd::execute(plan, options));
  });
}

pd_pool* pd_pool_create(uint32_t num_threads, const int32_t* cpus, uint64_t num_cpus) {
  return guarded([&] {
    pd::require(num_cpus == 0 || cpus != nullptr, "CPUs without an array");
    std::vector<int> wanted(cpus, cpus + num_cpus);
    return new pd_pool{pd::CopyPool(num_threads, std::move(wanted))};
  });
}

void pd_pool_free(pd_pool* pool) { delete pool; }

pd_job* pd_submit(pd_pool* pool, const pd_plan* plan, int stores, int64_t timeout_ms, uint32_t* checksums,
                  uint64_t num_checksums) {
  return guarded([&] {
    pd::require(pool != nullptr && plan != nullptr, "no pool or no plan");
    pd::CopyOptions options = to_options(stores, timeout_ms);
    options.checksums = {checksums, num_checksums};
    return new pd_job{pool->pool.submit(plan->plan, options)};
  });
}

int pd_job_poll(pd_job* job) {
  return guarded([&] { return static_cast<int>(job->job->poll()); });
}

int pd_job_wait(pd_job* job, int64_t timeout_ms) {
  return guarded([&] { return static_cast<int>(job->job->wait(to_deadline(timeout_ms))); });
}

void pd_job_cancel(pd_job* job) { job->job->cancel(); }

void pd_job_free(pd_job* job) {
  if (job == nullptr) return;
  job->job->cancel();
  guarded([&] { return static_cast<int>(job->job->wait(pd::Deadline::max())); });
  delete job;
}
}
