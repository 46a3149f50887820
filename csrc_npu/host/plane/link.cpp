// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <stdexcept>

#include "core.h"
#include "pd/plane.h"
#include "requester.h"

namespace pd {
namespace {

using Clock = std::chrono::steady_clock;

// Less is copied before another thread has woken up.
constexpr std::uint64_t kPoolBytes = 1 << 20;

std::uint64_t nanoseconds(Clock::duration span) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(span).count());
}

std::uint64_t bytes_of(const Transfer& transfer) {
  const std::uint64_t per_tensor = (transfer.local_blocks.size() - 1) * transfer.block_bytes + transfer.last_bytes;
  return per_tensor * transfer.num_tensors;
}

// A base that one side of a plan adds to each of its tensors.
std::vector<std::uint64_t> shifted(std::span<const std::uint64_t> tensors, std::uint64_t base) {
  std::vector<std::uint64_t> result(tensors.begin(), tensors.end());
  for (std::uint64_t& tensor : result) {
    tensor += base;
  }
  return result;
}

void add_blocks(CopyPlan& plan, const Transfer& transfer, std::span<const std::uint64_t> local,
                std::span<const std::uint64_t> remote, std::size_t first, std::size_t count, std::uint64_t bytes) {
  const BlockSlice whole{0, 0, bytes, 1, 0, 0};
  BlockPairs pairs;
  pairs.src_tensors = remote;
  pairs.dst_tensors = local;
  pairs.src_block_stride = transfer.block_bytes;
  pairs.dst_block_stride = transfer.block_bytes;
  pairs.src_blocks = transfer.remote_blocks.subspan(first, count);
  pairs.dst_blocks = transfer.local_blocks.subspan(first, count);
  pairs.slices = std::span(&whole, 1);
  plan.add(pairs);
}

std::shared_ptr<const CopyPlan> plan_copy(const Transfer& transfer, std::span<const std::uint64_t> local_tensors,
                                          std::span<const std::uint64_t> remote_tensors) {
  auto plan = std::make_shared<CopyPlan>();
  const std::vector<std::uint64_t> local = shifted(local_tensors, transfer.local_base);
  const std::vector<std::uint64_t> remote = shifted(remote_tensors, transfer.remote_base);
  const std::size_t count = transfer.local_blocks.size();
  const bool is_last_short = transfer.last_bytes != transfer.block_bytes;
  const std::size_t whole = is_last_short ? count - 1 : count;
  if (whole > 0) {
    add_blocks(*plan, transfer, local, remote, 0, whole, transfer.block_bytes);
  }
  if (is_last_short) {
    add_blocks(*plan, transfer, local, remote, whole, 1, transfer.last_bytes);
  }
  return plan;
}

Outcome invalid(std::string text) { return {LinkStatus::kInvalid, 0, 0, std::move(text)}; }

// Everything that does not need the peer.
Outcome check(const Transfer& transfer, const LocalCache& local, const RemoteCache& remote) {
  const std::uint64_t count = transfer.local_blocks.size();
  if (count == 0 || count != transfer.remote_blocks.size() || transfer.num_tensors == 0) {
    return invalid("nothing to move, or unequal numbers of blocks");
  }
  if (transfer.block_bytes == 0 || transfer.last_bytes == 0 || transfer.last_bytes > transfer.block_bytes ||
      transfer.block_bytes > std::min(local.tensor_bytes, remote.tensor_bytes)) {
    return invalid("blocks of " + std::to_string(transfer.block_bytes) + " bytes");
  }
  const auto is_inside = [&](std::uint64_t start, std::uint64_t limit) {
    return start <= limit && transfer.num_tensors <= limit - start;
  };
  if (!is_inside(transfer.local_tensor_start, local.tensors.size()) ||
      !is_inside(transfer.remote_tensor_start, remote.num_tensors)) {
    return invalid("tensors outside the cache");
  }
  const auto find = [&](std::span<const std::int64_t> blocks, std::uint64_t base, std::uint64_t tensor_bytes) {
    return find_outside(blocks, base, transfer.block_bytes, transfer.last_bytes, tensor_bytes);
  };
  if (const auto at = find(transfer.local_blocks, transfer.local_base, local.tensor_bytes); at >= 0) {
    return {LinkStatus::kBadLocalBlock, 0, transfer.local_blocks[static_cast<std::size_t>(at)], "local block"};
  }
  if (const auto at = find(transfer.remote_blocks, transfer.remote_base, remote.tensor_bytes); at >= 0) {
    return {LinkStatus::kBadRemoteBlock, 0, transfer.remote_blocks[static_cast<std::size_t>(at)], "remote block"};
  }
  const std::uint64_t num_pieces = count_pieces(transfer);
  if (transfer.max_words != 0 && transfer.num_tensors + 2 * num_pieces > transfer.max_words) {
    return {LinkStatus::kTooManyRuns, 0, static_cast<std::int64_t>(num_pieces), "request too long"};
  }
  return {};
}

}  // namespace

Link::Link(std::shared_ptr<PlaneCore> core, std::shared_ptr<ServedLink> served, const std::vector<int>& request_fds)
    : core_(std::move(core)),
      served_(std::move(served)),
      requester_(std::make_unique<Requester>(request_fds, core_->timeout)) {}

Link::~Link() {
  cut();
  core_->release(served_, false);
}

std::uint64_t Link::id() const { return served_->id(); }

void Link::add_remote_cache(RemoteCache cache) {
  const bool makes_sense = cache.num_tensors > 0 && cache.tensor_bytes > 0 && cache.tensor_bytes >> 62 == 0 &&
                           (cache.mapped.empty() || cache.mapped.size() == cache.num_tensors);
  if (!makes_sense) {
    throw std::invalid_argument("remote cache " + std::to_string(cache.id) + " makes no sense");
  }
  const std::lock_guard lock(transfer_mutex_);
  remote_.push_back(std::move(cache));
}

Outcome Link::transfer(const Transfer& transfer) {
  const std::lock_guard lock(transfer_mutex_);
  const ServedCaches::Use local = core_->caches.use(transfer.local_cache);
  Outcome outcome = local ? run(transfer, *local)
                          : invalid("no local cache " + std::to_string(transfer.local_cache) + " is registered");
  if (outcome.status != LinkStatus::kOk) {
    const std::lock_guard stats_lock(stats_mutex_);
    ++stats_.failures;
  }
  return outcome;
}

Outcome Link::run(const Transfer& transfer, const LocalCache& local) {
  const Clock::time_point started = Clock::now();
  const auto found = std::find_if(remote_.begin(), remote_.end(),
                                  [&](const RemoteCache& cache) { return cache.id == transfer.remote_cache; });
  if (found == remote_.end()) {
    return invalid("no remote cache " + std::to_string(transfer.remote_cache) + " is known");
  }
  if (Outcome outcome = check(transfer, local, *found); outcome.status != LinkStatus::kOk) {
    return outcome;
  }
  if (cut_.load()) {
    return {LinkStatus::kClosed, 0, 0, "the link has been closed"};
  }
  Outcome outcome = !transfer.is_write && !found->mapped.empty() ? copy_mapped(transfer, local, *found, started)
                                                                 : ask(transfer, local, started);
  if (outcome.status != LinkStatus::kOk && cut_.load()) {
    return {LinkStatus::kClosed, 0, 0, "the link was closed meanwhile"};
  }
  return outcome;
}

Outcome Link::copy_mapped(const Transfer& transfer, const LocalCache& local, const RemoteCache& remote,
                          Clock::time_point started) {
  const auto tensors = [&](const std::vector<std::uint64_t>& all, std::uint32_t start) {
    return std::span(all).subspan(start, transfer.num_tensors);
  };
  const std::shared_ptr<const CopyPlan> plan = plan_copy(transfer, tensors(local.tensors, transfer.local_tensor_start),
                                                         tensors(remote.mapped, transfer.remote_tensor_start));
  if (Outcome outcome = requester_->check_peer(); outcome.status != LinkStatus::kOk) {
    return outcome;
  }
  const Clock::time_point planned = Clock::now();
  CopyOptions options;
  options.deadline = transfer.deadline;
  options.cancel = &cut_;
  CopyState state = CopyState::kRunning;
  if (core_->copy_pool != nullptr && plan->num_bytes() >= kPoolBytes) {
    const std::shared_ptr<CopyJob> job = core_->copy_pool->submit(plan, options);
    state = job->wait(Deadline::max());  // the copy itself keeps the deadline, between chunks
  } else {
    state = execute(*plan, options);
  }
  if (state == CopyState::kDeadline) {
    return {LinkStatus::kTimeout, 0, 0, "deadline passed in the middle of a copy"};
  }
  if (state != CopyState::kDone) {
    return {LinkStatus::kClosed, 0, 0, "the copy was cancelled"};
  }
  // Gone: its memory may have been given to something else, the bytes do not count.
  if (Outcome outcome = requester_->check_peer(); outcome.status != LinkStatus::kOk) {
    return outcome;
  }
  count({1, plan->num_runs(), plan->num_pieces(), plan->num_bytes(), nanoseconds(planned - started),
         nanoseconds(Clock::now() - planned), 0});
  return {};
}

Outcome Link::ask(const Transfer& transfer, const LocalCache& local, Clock::time_point started) {
  PairedRuns runs = pair_runs(transfer);
  if (runs.remote.size() > kMaxRuns) {
    return {LinkStatus::kTooManyRuns, 0, static_cast<std::int64_t>(runs.remote.size()), "request too long"};
  }
  if (Outcome outcome = requester_->check_peer(); outcome.status != LinkStatus::kOk) {
    return outcome;
  }
  Posting posting;
  posting.request.is_write = transfer.is_write;
  posting.request.cache_id = transfer.remote_cache;
  posting.request.num_bytes = bytes_of(transfer);
  posting.request.tensor_start = transfer.remote_tensor_start;
  posting.request.tensor_stop = transfer.remote_tensor_start + transfer.num_tensors;
  posting.request.runs = std::move(runs.remote);
  posting.tensors = std::span(local.tensors).subspan(transfer.local_tensor_start, transfer.num_tensors);
  posting.local_runs = runs.local;
  posting.deadline = transfer.deadline;
  Clock::time_point posted = Clock::now();
  if (Outcome outcome = requester_->transfer(posting, posted); outcome.status != LinkStatus::kOk) {
    return outcome;
  }
  count({1, runs.local.size(), runs.num_pieces * transfer.num_tensors, posting.request.num_bytes,
         nanoseconds(posted - started), nanoseconds(Clock::now() - posted), 0});
  return {};
}

void Link::count(const LinkStats& moved) {
  const std::lock_guard lock(stats_mutex_);
  stats_.calls += moved.calls;
  stats_.runs += moved.runs;
  stats_.pieces += moved.pieces;
  stats_.bytes += moved.bytes;
  stats_.posting_ns += moved.posting_ns;
  stats_.moving_ns += moved.moving_ns;
}

void Link::cut() {
  cut_.store(true);
  requester_->cut();
}

void Link::close(Deadline deadline) {
  served_->mute();
  if (!cut_.load() && transfer_mutex_.try_lock()) {  // in the middle of a transfer the word would be taken for data
    requester_->say_bye();
    transfer_mutex_.unlock();
  }
  cut();
  core_->release(served_, true);
  if (!served_->wait_ended(deadline)) {
    core_->release(served_, false);
    served_->wait_ended(Deadline::max());  // soon: no loop's thread ever blocks
  }
}

LinkStats Link::stats() const {
  const std::lock_guard lock(stats_mutex_);
  return stats_;
}

}  // namespace pd
