// SPDX-License-Identifier: Apache-2.0
#include "core.h"

#include "serve_loop.h"

namespace pd {

void EventQueue::push(Event event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
  changed_.notify_one();
}

std::optional<Event> EventQueue::wait(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const std::uint64_t seen = wakes_;
  changed_.wait_until(lock, deadline, [&] { return !events_.empty() || wakes_ != seen; });
  if (events_.empty()) {
    return std::nullopt;
  }
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

void EventQueue::wake() {
  const std::lock_guard lock(mutex_);
  ++wakes_;
  changed_.notify_all();
}

void ServedLink::connection_began() {
  const std::lock_guard lock(mutex_);
  ++open_;
}

void ServedLink::connection_ended() {
  const std::lock_guard lock(mutex_);
  if (--open_ == 0) {
    ended_.notify_all();
  }
}

bool ServedLink::wait_ended(Deadline deadline) {
  std::unique_lock lock(mutex_);
  return ended_.wait_until(lock, deadline, [&] { return open_ == 0; });
}

bool ServedLink::claim_event() { return !told_.exchange(true); }

PlaneCore::PlaneCore(std::chrono::milliseconds transfer_timeout) : timeout(transfer_timeout) {}

PlaneCore::~PlaneCore() = default;

void PlaneCore::release(const std::shared_ptr<ServedLink>& link, bool farewell) {
  for (const std::unique_ptr<ServeLoop>& loop : loops) {
    loop->release(link, farewell);
  }
}

}  // namespace pd
