// SPDX-License-Identifier: Apache-2.0
// Two planes in one process, linked over socket pairs, and caches full of a pattern.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "pd/plane.h"
#include "testing.h"

namespace pd::testing {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

inline Deadline in(int ms) { return Clock::now() + milliseconds(ms); }

inline std::pair<int, int> socket_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) throw std::runtime_error("no socket pair");
  return {fds[0], fds[1]};
}

template <typename Condition>
void wait_until(Condition condition) {
  const Deadline limit = in(10'000);
  while (!condition()) {
    CHECK(Clock::now() < limit);
    std::this_thread::sleep_for(milliseconds(1));
  }
}

// Tensors of blocks; byte i of a tensor is unlike in every tensor, block and cache.
class Memory {
 public:
  Memory(std::size_t num_tensors, std::size_t num_blocks, std::size_t block_bytes, unsigned seed)
      : block_bytes_(block_bytes), tensors_(num_tensors) {
    for (std::size_t t = 0; t < num_tensors; ++t) {
      tensors_[t].resize(num_blocks * block_bytes);
      for (std::size_t i = 0; i < tensors_[t].size(); ++i) tensors_[t][i] = at(seed, t, i);
    }
  }

  static std::uint8_t at(unsigned seed, std::size_t tensor, std::size_t byte) {
    return static_cast<std::uint8_t>((std::size_t{seed} * 31 + tensor * 7 + byte + byte / 251 * 13) % 251 + 1);
  }

  std::uint8_t* block(std::size_t tensor, std::size_t number) { return &tensors_[tensor][number * block_bytes_]; }
  std::uint64_t tensor_bytes() const { return tensors_[0].size(); }
  std::vector<std::uint64_t> addresses() const {
    std::vector<std::uint64_t> result;
    result.reserve(tensors_.size());
    for (const auto& tensor : tensors_) result.push_back(reinterpret_cast<std::uint64_t>(tensor.data()));
    return result;
  }
  LocalCache cache(std::int64_t id, bool accessible = true) const {
    return {id, addresses(), tensor_bytes(), accessible};
  }

 private:
  std::size_t block_bytes_;
  std::vector<std::vector<std::uint8_t>> tensors_;
};

struct Ends {
  std::shared_ptr<Link> ours;
  std::shared_ptr<Link> theirs;
};

inline Ends connect(Plane& ours, Plane& theirs, unsigned connections, std::int64_t last_cache = 100) {
  std::vector<int> fds[4];
  for (unsigned i = 0; i < connections; ++i) {
    const auto [a, b] = socket_pair();
    const auto [c, d] = socket_pair();
    fds[0].push_back(a);
    fds[1].push_back(b);
    fds[2].push_back(c);
    fds[3].push_back(d);
  }
  return {ours.open_link(fds[0], fds[2], last_cache), theirs.open_link(fds[3], fds[1], last_cache)};
}

// A link of ours whose peer is the test: it holds the other ends.
struct RawPeer {
  std::shared_ptr<Link> link;
  int answers = -1;   // what the link asks over
  int requests = -1;  // what the plane serves
};

inline RawPeer connect_raw(Plane& plane, std::int64_t last_cache = 100) {
  const auto [a, b] = socket_pair();
  const auto [c, d] = socket_pair();
  return {plane.open_link({a}, {c}, last_cache), b, d};
}

inline Transfer move(const std::vector<std::int64_t>& local, const std::vector<std::int64_t>& remote,
                     std::uint32_t num_tensors, std::uint64_t block_bytes) {
  Transfer transfer;
  transfer.local_cache = 1;
  transfer.remote_cache = 1;
  transfer.num_tensors = num_tensors;
  transfer.block_bytes = block_bytes;
  transfer.last_bytes = block_bytes;
  transfer.local_blocks = local;
  transfer.remote_blocks = remote;
  transfer.deadline = in(10'000);
  return transfer;
}

}  // namespace pd::testing
