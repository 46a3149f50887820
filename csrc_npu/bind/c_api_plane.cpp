// SPDX-License-Identifier: Apache-2.0
// The host data plane: planes, links, transfers.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "handles.h"
#include "pd/c_api.h"
#include "pd/check.h"
#include "pd/plane.h"

struct pd_plane {
  pd::Plane plane;
};

struct pd_link {
  std::shared_ptr<pd::Link> link;
};

namespace {

using pd::bind::guarded;
using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC wherever this builds

pd::Deadline after(std::int64_t timeout_ms) {
  constexpr std::int64_t kLongestMs = 1'000'000'000;  // far away, and no sum overflows
  const std::int64_t bounded = timeout_ms < 0 ? kLongestMs : std::min(timeout_ms, kLongestMs);
  return Clock::now() + std::chrono::milliseconds(bounded);
}

template <std::size_t kSize>
void copy_text(char (&to)[kSize], const std::string& from) {
  const std::size_t size = std::min(from.size(), kSize - 1);
  std::memcpy(to, from.data(), size);
  to[size] = '\0';
}

std::uint32_t to_index(std::uint64_t value) {
  pd::require(value >> 32 == 0, "a tensor index or number beyond 32 bits");
  return static_cast<std::uint32_t>(value);
}

pd::Transfer read_transfer(const pd_transfer& from, bool is_write) {
  pd::require(from.num_blocks > 0 && from.local_blocks != nullptr && from.remote_blocks != nullptr, "no blocks");
  pd::Transfer transfer;
  transfer.is_write = is_write;
  transfer.local_cache = from.local_cache;
  transfer.remote_cache = from.remote_cache;
  transfer.local_tensor_start = to_index(from.local_tensor_start);
  transfer.remote_tensor_start = to_index(from.remote_tensor_start);
  transfer.num_tensors = to_index(from.num_tensors);
  transfer.local_base = from.local_base;
  transfer.remote_base = from.remote_base;
  transfer.block_bytes = from.block_bytes;
  transfer.last_bytes = from.last_bytes;
  transfer.local_blocks = {from.local_blocks, from.num_blocks};
  transfer.remote_blocks = {from.remote_blocks, from.num_blocks};
  transfer.max_words = from.max_words;
  transfer.deadline = pd::Deadline(std::chrono::nanoseconds(from.deadline_ns));
  return transfer;
}

int run(pd_link* link, const pd_transfer* transfer, pd_outcome* outcome, bool is_write) {
  return guarded([&] {
    pd::require(link != nullptr && transfer != nullptr && outcome != nullptr, "no link, transfer or outcome");
    const pd::Outcome how = link->link->transfer(read_transfer(*transfer, is_write));
    outcome->status = static_cast<std::int32_t>(how.status);
    outcome->peer_status = how.peer_status;
    outcome->value = how.value;
    copy_text(outcome->text, how.text);
    return 0;
  });
}

std::vector<int> read_fds(std::uint64_t count, const std::int32_t* fds) {
  return count == 0 ? std::vector<int>{} : std::vector<int>(fds, fds + count);
}

}  // namespace

extern "C" {

pd_plane* pd_plane_create(uint32_t num_threads, int64_t transfer_timeout_ms, pd_pool* pool) {
  return guarded([&] {
    // Whoever made the pool owns it.
    std::shared_ptr<pd::CopyPool> shared(pool == nullptr ? nullptr : &pool->pool, [](pd::CopyPool*) {});
    return new pd_plane{pd::Plane(num_threads, std::chrono::milliseconds(transfer_timeout_ms), std::move(shared))};
  });
}

void pd_plane_free(pd_plane* plane) { delete plane; }

int pd_plane_add_cache(pd_plane* plane, int64_t id, uint64_t num_tensors, const uint64_t* tensors,
                       uint64_t tensor_bytes, int accessible) {
  return guarded([&] {
    pd::require(plane != nullptr && (num_tensors == 0 || tensors != nullptr), "no plane, or tensors without addresses");
    plane->plane.add_cache({id, {tensors, tensors + num_tensors}, tensor_bytes, accessible != 0});
    return 0;
  });
}

int pd_plane_remove_cache(pd_plane* plane, int64_t id, int64_t timeout_ms) {
  return guarded([&] { return plane->plane.remove_cache(id, after(timeout_ms)) ? 1 : 0; });
}

pd_link* pd_plane_open_link(pd_plane* plane, uint64_t num_request, const int32_t* request_fds, uint64_t num_serve,
                            const int32_t* serve_fds, int64_t last_local_cache) {
  return guarded([&] {
    return new pd_link{
        plane->plane.open_link(read_fds(num_request, request_fds), read_fds(num_serve, serve_fds), last_local_cache)};
  });
}

int pd_plane_wait_event(pd_plane* plane, int64_t timeout_ms, pd_event* event) {
  return guarded([&] {
    const std::optional<pd::Event> found = plane->plane.wait_event(after(timeout_ms));
    if (!found) {
      return 0;
    }
    event->link_id = found->link_id;
    event->kind = static_cast<std::int32_t>(found->kind);
    copy_text(event->text, found->text);
    return 1;
  });
}

void pd_plane_wake(pd_plane* plane) { plane->plane.wake_waiters(); }

void pd_plane_stats(const pd_plane* plane, uint64_t* stats) {
  const pd::PlaneStats now = plane->plane.stats();
  const uint64_t values[PD_PLANE_STATS] = {now.connections, now.requests,   now.refused,
                                           now.bytes,       now.bad_frames, now.stalled};
  std::copy(std::begin(values), std::end(values), stats);
}

uint64_t pd_link_id(const pd_link* link) { return link->link->id(); }

int pd_link_add_cache(pd_link* link, int64_t id, uint64_t num_tensors, uint64_t tensor_bytes, const uint64_t* mapped) {
  return guarded([&] {
    pd::RemoteCache cache{id, to_index(num_tensors), tensor_bytes, {}};
    if (mapped != nullptr) {
      cache.mapped.assign(mapped, mapped + num_tensors);
    }
    link->link->add_remote_cache(std::move(cache));
    return 0;
  });
}

int pd_link_read(pd_link* link, const pd_transfer* transfer, pd_outcome* outcome) {
  return run(link, transfer, outcome, false);
}

int pd_link_write(pd_link* link, const pd_transfer* transfer, pd_outcome* outcome) {
  return run(link, transfer, outcome, true);
}

void pd_link_cut(pd_link* link) { link->link->cut(); }

void pd_link_close(pd_link* link, int64_t timeout_ms) { link->link->close(after(timeout_ms)); }

void pd_link_free(pd_link* link) { delete link; }

void pd_link_stats(const pd_link* link, uint64_t* stats) {
  const pd::LinkStats now = link->link->stats();
  const uint64_t values[PD_LINK_STATS] = {now.calls,      now.runs,      now.pieces,  now.bytes,
                                          now.posting_ns, now.moving_ns, now.failures};
  std::copy(std::begin(values), std::end(values), stats);
}

void pd_blocks_range(uint64_t num_blocks, const int64_t* blocks, int64_t* range) {
  range[0] = 0;
  range[1] = -1;
  if (num_blocks > 0) {
    const auto [low, high] = std::minmax_element(blocks, blocks + num_blocks);
    range[0] = *low;
    range[1] = *high;
  }
}
}
