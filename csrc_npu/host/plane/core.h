// SPDX-License-Identifier: Apache-2.0
// What a plane's threads and links share.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "pd/plane.h"
#include "served_caches.h"

namespace pd {

class ServeLoop;

class EventQueue {
 public:
  void push(Event event);
  std::optional<Event> wait(Deadline deadline);
  void wake();

 private:
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::deque<Event> events_;
  std::uint64_t wakes_ = 0;
};

struct PlaneCounters {
  std::atomic<std::uint64_t> connections{0};
  std::atomic<std::uint64_t> requests{0};
  std::atomic<std::uint64_t> refused{0};
  std::atomic<std::uint64_t> bytes{0};
  std::atomic<std::uint64_t> bad_frames{0};
  std::atomic<std::uint64_t> stalled{0};
};

// The incoming side of one link: what its connections, in several loops, have in common.
class ServedLink {
 public:
  ServedLink(std::uint64_t id, std::int64_t last_cache_id) : id_(id), last_cache_id_(last_cache_id) {}

  std::uint64_t id() const { return id_; }
  std::int64_t last_cache_id() const { return last_cache_id_; }

  void connection_began();
  void connection_ended();
  bool wait_ended(Deadline deadline);  // of all connections
  // True for the first end that is worth telling: never after close() began on this side.
  bool claim_event();
  void mute() { told_.store(true); }

 private:
  const std::uint64_t id_;
  const std::int64_t last_cache_id_;
  std::atomic<bool> told_{false};
  std::mutex mutex_;  // guards open_
  std::condition_variable ended_;
  int open_ = 0;
};

struct PlaneCore {
  explicit PlaneCore(std::chrono::milliseconds transfer_timeout);
  ~PlaneCore();
  PlaneCore(const PlaneCore&) = delete;
  PlaneCore& operator=(const PlaneCore&) = delete;

  const std::chrono::milliseconds timeout;
  ServedCaches caches;
  EventQueue events;
  PlaneCounters counters;
  std::shared_ptr<CopyPool> copy_pool;
  std::vector<std::unique_ptr<ServeLoop>> loops;  // fixed once the plane stands
  std::atomic<std::uint64_t> next_link{1};
  std::atomic<std::size_t> next_loop{0};

  // Every loop ends its connections of that link: with a farewell once they are idle, or at once.
  void release(const std::shared_ptr<ServedLink>& link, bool farewell);
};

}  // namespace pd
