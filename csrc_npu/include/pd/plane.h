// SPDX-License-Identifier: Apache-2.0
// The host data plane: serves a peer's reads and writes of our registered caches, and makes our own.
//
// One Plane per process. Its few threads serve all incoming connections of all links; a Link's transfers run in
// their caller's thread (and the copy pool's). No part of it ever needs Python's lock.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pd/copy_engine.h"

namespace pd {

inline constexpr unsigned kMaxConnections = 16;  // per direction of a link

// How a transfer ended. All but kOk, kRefused, kInvalid, the kBad*Block and kTooManyRuns make the link useless.
enum class LinkStatus : int {
  kOk = 0,
  kTimeout = 1,
  kPeerGone = 2,
  kPeerUnlinked = 3,  // it said farewell
  kBadFrame = 4,
  kRefused = 5,  // by the peer, which names a status of the interface
  kLocalFault = 6,
  kClosed = 7,  // on this side, by cut() or close()
  kBadLocalBlock = 8,
  kBadRemoteBlock = 9,
  kTooManyRuns = 10,
  kInvalid = 11,
};

struct Outcome {
  LinkStatus status = LinkStatus::kOk;
  std::uint32_t peer_status = 0;  // with kRefused
  std::int64_t value = 0;         // the block with kBad*Block, the number of runs with kTooManyRuns
  std::string text;
};

struct LocalCache {
  std::int64_t id = 0;
  std::vector<std::uint64_t> tensors;  // base addresses
  std::uint64_t tensor_bytes = 0;
  bool accessible = false;
};

// A peer's cache as it was when the link was made.
struct RemoteCache {
  std::int64_t id = 0;
  std::uint32_t num_tensors = 0;
  std::uint64_t tensor_bytes = 0;
  std::vector<std::uint64_t> mapped;  // base addresses here; empty: only its owner can reach it
};

// Blocks of a range of tensors: block i lies at base + blocks[i] * block_bytes of each tensor.
struct Transfer {
  bool is_write = false;  // local to remote
  std::int64_t local_cache = 0;
  std::int64_t remote_cache = 0;
  std::uint32_t local_tensor_start = 0;
  std::uint32_t remote_tensor_start = 0;
  std::uint32_t num_tensors = 0;
  std::uint64_t local_base = 0;
  std::uint64_t remote_base = 0;
  std::uint64_t block_bytes = 0;
  std::uint64_t last_bytes = 0;  // of the last block, at most block_bytes
  std::span<const std::int64_t> local_blocks;
  std::span<const std::int64_t> remote_blocks;  // as many
  std::uint64_t max_words = 0;                  // tensors + 2 * runs that one request may name; 0: no limit
  Deadline deadline = Deadline::max();
};

struct LinkStats {
  std::uint64_t calls = 0;   // transfers that succeeded
  std::uint64_t runs = 0;    // descriptors that they took
  std::uint64_t pieces = 0;  // contiguous pieces of memory
  std::uint64_t bytes = 0;
  std::uint64_t posting_ns = 0;  // until all requests were sent, or the copy was planned
  std::uint64_t moving_ns = 0;
  std::uint64_t failures = 0;
};

struct PlaneStats {
  std::uint64_t connections = 0;  // that are served now
  std::uint64_t requests = 0;
  std::uint64_t refused = 0;
  std::uint64_t bytes = 0;  // sent and received for peers
  std::uint64_t bad_frames = 0;
  std::uint64_t stalled = 0;  // peers that stopped in the middle of a transfer
};

// What became of the incoming side of a link; at most one per link.
enum class LinkEvent : int { kNone = 0, kFarewell = 1, kVanished = 2, kBroken = 3 };

struct Event {
  std::uint64_t link_id = 0;
  LinkEvent kind = LinkEvent::kNone;
  std::string text;
};

struct PlaneCore;  // what a plane's links and threads share
class ServedLink;  // the incoming side
class Requester;   // the outgoing side

class Link {
 public:
  Link(std::shared_ptr<PlaneCore> core, std::shared_ptr<ServedLink> served, const std::vector<int>& request_fds);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  std::uint64_t id() const;
  // Before the first transfer.
  void add_remote_cache(RemoteCache cache);
  // One at a time; a second caller waits. Returns when nothing is touched any more.
  Outcome transfer(const Transfer& transfer);
  // Ends a transfer that runs (with kClosed) and all connections, without a farewell. Any thread.
  void cut();
  // Says farewell where no transfer runs, lets answers that are on their way end until `deadline`, then cuts.
  void close(Deadline deadline);
  LinkStats stats() const;

 private:
  Outcome run(const Transfer& transfer, const LocalCache& local);
  Outcome copy_mapped(const Transfer& transfer, const LocalCache& local, const RemoteCache& remote,
                      std::chrono::steady_clock::time_point started);
  Outcome ask(const Transfer& transfer, const LocalCache& local, std::chrono::steady_clock::time_point started);
  void count(const LinkStats& moved);

  std::shared_ptr<PlaneCore> core_;
  std::shared_ptr<ServedLink> served_;
  std::unique_ptr<Requester> requester_;
  std::mutex transfer_mutex_;  // held by the transfer that runs; guards remote_
  std::vector<RemoteCache> remote_;
  std::atomic<bool> cut_{false};
  mutable std::mutex stats_mutex_;  // guards stats_
  LinkStats stats_;
};

class Plane {
 public:
  // `transfer_timeout` bounds each answer to a peer. Without a pool, mapped copies run in their caller's thread.
  Plane(unsigned num_threads, std::chrono::milliseconds transfer_timeout, std::shared_ptr<CopyPool> copy_pool);
  ~Plane();  // ends all connections, joins the threads; its links stay valid objects that are of no use
  Plane(const Plane&) = delete;
  Plane& operator=(const Plane&) = delete;

  // Throws std::invalid_argument for an id that is taken or a cache that makes no sense.
  void add_cache(LocalCache cache);
  // Waits until nothing touches its memory; false when something still did at the deadline. Unknown: true.
  bool remove_cache(std::int64_t id, Deadline deadline);

  // Takes the descriptors, also when it throws. We ask over `request_fds` and serve `serve_fds`; caches younger than
  // `last_local_cache` do not exist for this peer.
  std::shared_ptr<Link> open_link(const std::vector<int>& request_fds, const std::vector<int>& serve_fds,
                                  std::int64_t last_local_cache);

  std::optional<Event> wait_event(Deadline deadline);
  void wake_waiters();  // every wait_event() that runs returns
  PlaneStats stats() const;

 private:
  std::shared_ptr<PlaneCore> core_;
};

}  // namespace pd
