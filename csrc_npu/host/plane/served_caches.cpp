// SPDX-License-Identifier: Apache-2.0
#include "served_caches.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace pd {

ServedCaches::Use& ServedCaches::Use::operator=(Use&& other) noexcept {
  if (this != &other) {
    reset();
    owner_ = other.owner_;
    cache_ = std::exchange(other.cache_, nullptr);
  }
  return *this;
}

void ServedCaches::Use::reset() {
  if (cache_ != nullptr) {
    owner_->release(cache_->id);
    cache_.reset();
  }
}

void ServedCaches::add(LocalCache cache) {
  if (cache.id <= 0 || cache.tensors.empty() || cache.tensor_bytes == 0 || cache.tensor_bytes >> 62 != 0) {
    throw std::invalid_argument("cache " + std::to_string(cache.id) + " of " + std::to_string(cache.tensors.size()) +
                                " tensors of " + std::to_string(cache.tensor_bytes) + " bytes");
  }
  const std::lock_guard lock(mutex_);
  const std::int64_t id = cache.id;
  if (!caches_.emplace(id, std::make_shared<const LocalCache>(std::move(cache))).second) {
    throw std::invalid_argument("cache " + std::to_string(id) + " exists already");
  }
}

ServedCaches::Use ServedCaches::use(std::int64_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = caches_.find(id);
  if (found == caches_.end()) {
    return {};
  }
  ++users_[id];
  return {this, found->second};
}

void ServedCaches::release(std::int64_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = users_.find(id);
  if (--found->second == 0) {
    users_.erase(found);
    changed_.notify_all();
  }
}

bool ServedCaches::remove(std::int64_t id, Deadline deadline) {
  std::unique_lock lock(mutex_);
  caches_.erase(id);
  return changed_.wait_until(lock, deadline, [&] { return !users_.contains(id); });
}

}  // namespace pd
