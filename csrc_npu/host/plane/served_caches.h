// SPDX-License-Identifier: Apache-2.0
// The caches that this process has registered, and who touches their memory now. All methods: any thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "pd/plane.h"

namespace pd {

class ServedCaches {
 public:
  // A cache that stays registered at least as long as the guard: remove() waits for it.
  class Use {
   public:
    Use() = default;
    Use(ServedCaches* owner, std::shared_ptr<const LocalCache> cache) : owner_(owner), cache_(std::move(cache)) {}
    ~Use() { reset(); }
    Use(Use&& other) noexcept : owner_(other.owner_), cache_(std::move(other.cache_)) { other.cache_.reset(); }
    Use& operator=(Use&& other) noexcept;
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    explicit operator bool() const { return cache_ != nullptr; }
    const LocalCache& operator*() const { return *cache_; }
    const LocalCache* operator->() const { return cache_.get(); }
    void reset();

   private:
    ServedCaches* owner_ = nullptr;
    std::shared_ptr<const LocalCache> cache_;
  };

  void add(LocalCache cache);  // throws std::invalid_argument
  Use use(std::int64_t id);    // empty when there is none of that id
  bool remove(std::int64_t id, Deadline deadline);

 private:
  void release(std::int64_t id);

  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::map<std::int64_t, std::shared_ptr<const LocalCache>> caches_;
  std::map<std::int64_t, int> users_;  // by id, also of caches that have been removed; ids are never used again
};

}  // namespace pd
