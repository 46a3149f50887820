// SPDX-License-Identifier: Apache-2.0
// Transfers between two planes: bytes, counters, refusals, and every way in which a peer can be lost meanwhile.
#include <atomic>
#include <cstring>
#include <numeric>

#include "host/plane/wire.h"
#include "plane_testing.h"

using namespace pd;
using namespace pd::testing;

namespace {

constexpr std::size_t kTensors = 4, kBlocks = 64, kBlockBytes = 8192;

struct Pair {
  explicit Pair(unsigned connections = 2, int timeout_ms = 2000)
      : local(kTensors, kBlocks, kBlockBytes, 1),
        remote(kTensors, kBlocks, kBlockBytes, 2),
        ours(2, milliseconds(timeout_ms), nullptr),
        theirs(2, milliseconds(timeout_ms), nullptr) {
    ours.add_cache(local.cache(1));
    theirs.add_cache(remote.cache(1));
    ends = connect(ours, theirs, connections);
    ends.ours->add_remote_cache({1, kTensors, remote.tensor_bytes(), {}});
    ends.theirs->add_remote_cache({1, kTensors, local.tensor_bytes(), {}});
  }

  Memory local, remote;
  Plane ours, theirs;
  Ends ends;
};

bool same(Memory& left, std::size_t left_block, Memory& right, std::size_t right_block) {
  for (std::size_t t = 0; t < kTensors; ++t) {
    if (std::memcmp(left.block(t, left_block), right.block(t, right_block), kBlockBytes) != 0) return false;
  }
  return true;
}

std::vector<std::int64_t> all_blocks() {
  std::vector<std::int64_t> blocks(kBlocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  return blocks;
}

}  // namespace

TEST(reads_move_every_byte_whatever_the_number_of_connections) {
  for (const unsigned connections : {1u, 2u, 3u, 16u}) {
    Pair pair(connections);
    const std::vector<std::int64_t> dst{3, 4, 5, 63, 0, 20}, src{9, 10, 11, 0, 63, 21};
    CHECK(pair.ends.ours->transfer(move(dst, src, kTensors, kBlockBytes)).status == LinkStatus::kOk);
    for (std::size_t i = 0; i < dst.size(); ++i) {
      CHECK(same(pair.local, static_cast<std::size_t>(dst[i]), pair.remote, static_cast<std::size_t>(src[i])));
    }
    Memory untouched(kTensors, kBlocks, kBlockBytes, 1);
    CHECK(same(pair.local, 1, untouched, 1) && same(pair.local, 62, untouched, 62));
    const auto every = all_blocks();
    CHECK(pair.ends.ours->transfer(move(every, every, kTensors, kBlockBytes)).status == LinkStatus::kOk);
    for (std::size_t b = 0; b < kBlocks; ++b) CHECK(same(pair.local, b, pair.remote, b));
  }
}

TEST(writes_move_every_byte_and_both_directions_work_at_once) {
  Pair pair(2);
  const auto every = all_blocks();
  std::atomic<bool> failed{false};
  std::thread other([&] {
    for (int i = 0; i < 20; ++i) {
      const std::vector<std::int64_t> dst{40, 41}, src{40, 41};
      if (pair.ends.theirs->transfer(move(dst, src, kTensors, kBlockBytes)).status != LinkStatus::kOk) failed = true;
    }
  });
  for (int i = 0; i < 20; ++i) {
    const std::vector<std::int64_t> src{7, 8, 30}, dst{1, 2, 3};
    Transfer transfer = move(src, dst, kTensors, kBlockBytes);
    transfer.is_write = true;
    if (pair.ends.ours->transfer(transfer).status != LinkStatus::kOk) failed = true;
  }
  other.join();
  CHECK(!failed);
  CHECK(same(pair.local, 7, pair.remote, 1) && same(pair.local, 30, pair.remote, 3));
  CHECK(same(pair.remote, 40, pair.local, 40));
}

TEST(one_call_counts_runs_pieces_and_bytes) {
  Pair pair(4);
  const auto every = all_blocks();
  CHECK(pair.ends.ours->transfer(move(every, every, kTensors, kBlockBytes)).status == LinkStatus::kOk);
  LinkStats stats = pair.ends.ours->stats();
  CHECK(stats.calls == 1 && stats.runs == 1 && stats.pieces == kTensors && stats.failures == 0);
  CHECK_EQUAL(stats.bytes, kTensors * kBlocks * kBlockBytes);
  CHECK(stats.moving_ns > 0);
  const std::vector<std::int64_t> dst{0, 2, 4, 5}, src{8, 10, 12, 13};
  CHECK(pair.ends.ours->transfer(move(dst, src, kTensors, kBlockBytes)).status == LinkStatus::kOk);
  stats = pair.ends.ours->stats();
  CHECK(stats.calls == 2 && stats.runs == 3 && stats.pieces == 4 * kTensors);
}

TEST(mapped_reads_copy_without_asking_the_peer) {
  Pair pair(1);
  const std::vector<std::int64_t> dst{5, 6, 9}, src{1, 2, 3};
  Ends mapped = connect(pair.ours, pair.theirs, 1);
  mapped.ours->add_remote_cache({1, kTensors, pair.remote.tensor_bytes(), pair.remote.addresses()});
  Transfer transfer = move(dst, src, 2, kBlockBytes);
  transfer.local_tensor_start = 2;
  transfer.remote_tensor_start = 1;
  transfer.last_bytes = 100;
  CHECK(mapped.ours->transfer(transfer).status == LinkStatus::kOk);
  CHECK(std::memcmp(pair.local.block(2, 5), pair.remote.block(1, 1), 2 * kBlockBytes) == 0);
  CHECK(std::memcmp(pair.local.block(3, 9), pair.remote.block(2, 3), 100) == 0);
  CHECK(std::memcmp(pair.local.block(3, 9) + 100, pair.remote.block(2, 3) + 100, 100) != 0);
  CHECK_EQUAL(pair.theirs.stats().requests, 0u);
  CHECK_EQUAL(mapped.ours->stats().calls, 1u);
}

TEST(what_does_not_fit_is_refused_before_anything_is_sent) {
  Pair pair(1);
  const auto status = [&](Transfer transfer) { return pair.ends.ours->transfer(transfer).status; };
  const std::vector<std::int64_t> good{1, 3}, high{1, 64}, low{-1, 3};
  CHECK(status(move(high, good, kTensors, kBlockBytes)) == LinkStatus::kBadLocalBlock);
  CHECK(status(move(good, high, kTensors, kBlockBytes)) == LinkStatus::kBadRemoteBlock);
  CHECK(status(move(low, good, kTensors, kBlockBytes)) == LinkStatus::kBadLocalBlock);
  CHECK_EQUAL(pair.ends.ours->transfer(move(good, high, kTensors, kBlockBytes)).value, 64);
  CHECK(status(move(good, good, kTensors + 1, kBlockBytes)) == LinkStatus::kInvalid);
  Transfer transfer = move(good, good, kTensors, kBlockBytes);
  transfer.remote_tensor_start = UINT32_MAX;
  CHECK(status(transfer) == LinkStatus::kInvalid);
  transfer = move(good, good, kTensors, kBlockBytes);
  transfer.remote_base = UINT64_MAX - 5;
  CHECK(status(transfer) == LinkStatus::kBadRemoteBlock);
  transfer = move(good, good, kTensors, kBlockBytes);
  transfer.max_words = kTensors + 3;
  CHECK(status(transfer) == LinkStatus::kTooManyRuns);
  transfer.max_words = kTensors + 4;
  CHECK(status(transfer) == LinkStatus::kOk);
  transfer.local_cache = 9;
  CHECK(status(transfer) == LinkStatus::kInvalid);
  CHECK_EQUAL(pair.theirs.stats().requests, 1u);
}

TEST(a_refusing_peer_leaves_the_link_usable) {
  Pair pair(2);
  Memory hidden(kTensors, kBlocks, kBlockBytes, 5);
  pair.theirs.add_cache(hidden.cache(2, false));
  pair.theirs.add_cache(hidden.cache(101));
  for (const std::int64_t id : {2, 50, 101}) {
    pair.ends.ours->add_remote_cache({id, kTensors, hidden.tensor_bytes(), {}});
    for (const bool is_write : {false, true}) {
      Transfer transfer = move(all_blocks(), all_blocks(), kTensors, kBlockBytes);
      const auto blocks = all_blocks();
      transfer.local_blocks = transfer.remote_blocks = blocks;
      transfer.remote_cache = id;
      transfer.is_write = is_write;
      const Outcome outcome = pair.ends.ours->transfer(transfer);
      CHECK(outcome.status == LinkStatus::kRefused);
      CHECK_EQUAL(outcome.peer_status, id == 2 ? kStatusInvalid : kStatusNoCache);
    }
  }
  const std::vector<std::int64_t> one{1};
  CHECK(pair.ends.ours->transfer(move(one, one, kTensors, kBlockBytes)).status == LinkStatus::kOk);
}

TEST(a_farewell_is_not_a_loss) {
  Pair pair(2);
  pair.ends.theirs->close(in(1000));
  const std::vector<std::int64_t> one{1};
  CHECK(pair.ends.ours->transfer(move(one, one, kTensors, kBlockBytes)).status == LinkStatus::kPeerUnlinked);
  const auto event = pair.ours.wait_event(in(5000));
  CHECK(event.has_value() && event->kind == LinkEvent::kFarewell && event->link_id == pair.ends.ours->id());
  CHECK(pair.ends.theirs->transfer(move(one, one, kTensors, kBlockBytes)).status == LinkStatus::kClosed);
  CHECK(!pair.theirs.wait_event(in(50)).has_value());
}

TEST(a_closed_connection_is_a_loss_before_and_in_the_middle) {
  Plane plane(1, milliseconds(2000), nullptr);
  Memory memory(kTensors, kBlocks, kBlockBytes, 1);
  plane.add_cache(memory.cache(1));
  const auto every = all_blocks();
  for (const bool in_the_middle : {false, true}) {
    RawPeer raw = connect_raw(plane);
    raw.link->add_remote_cache({1, kTensors, memory.tensor_bytes(), {}});
    std::thread peer([&] {
      if (in_the_middle) {
        char request[kHeaderBytes + kRequestBytes + kRunBytes];
        CHECK(::recv(raw.answers, request, sizeof(request), MSG_WAITALL) == static_cast<ssize_t>(sizeof(request)));
        const auto reply = encode_reply({kTensors * kBlocks * kBlockBytes, kStatusOk, {}}, 1);
        CHECK(::send(raw.answers, reply.data(), reply.size(), 0) > 0);
        const std::vector<char> some(100'000, 'x');
        CHECK(::send(raw.answers, some.data(), some.size(), 0) > 0);
      }
      ::close(raw.answers);
      ::close(raw.requests);
    });
    if (!in_the_middle) peer.join();
    CHECK(raw.link->transfer(move(every, every, kTensors, kBlockBytes)).status == LinkStatus::kPeerGone);
    if (in_the_middle) peer.join();
    const auto event = plane.wait_event(in(5000));
    CHECK(event.has_value() && event->kind == LinkEvent::kVanished);
  }
}

// Whether a copy into `target` has begun. Reads what the copy writes, on purpose: it only looks for a first sign.
__attribute__((no_sanitize("thread"))) bool has_begun(const std::vector<std::uint8_t>& target) {
  const volatile std::uint8_t* bytes = target.data();
  for (std::size_t at = 0; at < target.size(); at += 64u << 10) {
    if (bytes[at] != 0) return true;
  }
  return false;
}

TEST(bytes_that_a_peer_let_us_copy_do_not_count_when_it_ends_meanwhile) {
  constexpr std::size_t kLarge = 48u << 20;
  const std::vector<std::int64_t> one{0};
  LinkStatus status = LinkStatus::kOk;
  // On a busy machine a copy may be over before the peer has ended; then it counts, and another one is tried.
  for (int attempt = 0; attempt < 20 && status == LinkStatus::kOk; ++attempt) {
    Plane plane(1, milliseconds(5000), nullptr);
    std::vector<std::uint8_t> target(kLarge, 0), source(kLarge, 7);
    plane.add_cache({1, {reinterpret_cast<std::uint64_t>(target.data())}, kLarge, true});
    RawPeer raw = connect_raw(plane);
    raw.link->add_remote_cache({1, 1, kLarge, {reinterpret_cast<std::uint64_t>(source.data())}});
    std::thread peer([&] {
      while (!has_begun(target)) std::this_thread::yield();
      ::close(raw.answers);
      ::close(raw.requests);
    });
    status = raw.link->transfer(move(one, one, 1, kLarge)).status;  // begun: the check before it has passed
    peer.join();
  }
  CHECK(status == LinkStatus::kPeerGone);
}

TEST(a_silent_peer_is_a_timeout_in_time) {
  Plane plane(1, milliseconds(2000), nullptr);
  Memory memory(kTensors, kBlocks, kBlockBytes, 1);
  plane.add_cache(memory.cache(1));
  RawPeer raw = connect_raw(plane);
  raw.link->add_remote_cache({1, kTensors, memory.tensor_bytes(), {}});
  const std::vector<std::int64_t> one{1};
  Transfer transfer = move(one, one, kTensors, kBlockBytes);
  transfer.deadline = in(100);
  const auto started = Clock::now();
  CHECK(raw.link->transfer(transfer).status == LinkStatus::kTimeout);
  CHECK(Clock::now() - started >= milliseconds(100) && Clock::now() - started < milliseconds(1500));
  ::close(raw.answers);
  ::close(raw.requests);
}

TEST(what_is_no_answer_is_a_bad_frame) {
  for (const bool unasked : {false, true}) {
    Plane plane(1, milliseconds(2000), nullptr);
    Memory memory(kTensors, kBlocks, kBlockBytes, 1);
    plane.add_cache(memory.cache(1));
    RawPeer raw = connect_raw(plane);
    raw.link->add_remote_cache({1, kTensors, memory.tensor_bytes(), {}});
    const auto reply = encode_reply({5, kStatusOk, {}}, unasked ? 0 : 1);
    std::thread peer([&] {
      char byte = 0;
      if (!unasked) CHECK(::recv(raw.answers, &byte, 1, MSG_PEEK) == 1);
      CHECK(::send(raw.answers, reply.data(), reply.size(), 0) > 0);
    });
    if (unasked) peer.join();
    const std::vector<std::int64_t> one{1};
    CHECK(raw.link->transfer(move(one, one, kTensors, kBlockBytes)).status == LinkStatus::kBadFrame);
    if (!unasked) peer.join();
    ::close(raw.answers);
    ::close(raw.requests);
  }
}

TEST(an_answer_to_another_request_is_a_bad_frame) {
  for (const std::uint32_t sequence : {1u, 2u}) {  // of the first request: 1
    Plane plane(1, milliseconds(2000), nullptr);
    Memory memory(kTensors, kBlocks, kBlockBytes, 1);
    plane.add_cache(memory.cache(1));
    RawPeer raw = connect_raw(plane);
    raw.link->add_remote_cache({1, kTensors, memory.tensor_bytes(), {}});
    const std::uint64_t num_bytes = kTensors * kBlockBytes;
    const auto reply = encode_reply({num_bytes, kStatusOk, {}}, sequence);
    const std::vector<std::byte> bytes(num_bytes);
    std::thread peer([&] {
      char byte = 0;
      CHECK(::recv(raw.answers, &byte, 1, MSG_PEEK) == 1);
      CHECK(::send(raw.answers, reply.data(), reply.size(), 0) > 0);
      CHECK(::send(raw.answers, bytes.data(), bytes.size(), MSG_NOSIGNAL) != 0);
    });
    const std::vector<std::int64_t> one{1};
    const LinkStatus wanted = sequence == 1 ? LinkStatus::kOk : LinkStatus::kBadFrame;
    CHECK(raw.link->transfer(move(one, one, kTensors, kBlockBytes)).status == wanted);
    peer.join();
    ::close(raw.answers);
    ::close(raw.requests);
  }
}

TEST(cut_ends_a_running_transfer) {
  Plane plane(1, milliseconds(20'000), nullptr);
  Memory memory(kTensors, kBlocks, kBlockBytes, 1);
  plane.add_cache(memory.cache(1));
  RawPeer raw = connect_raw(plane);
  raw.link->add_remote_cache({1, kTensors, memory.tensor_bytes(), {}});
  std::thread cutter([&] {
    char byte = 0;
    (void)!::recv(raw.answers, &byte, 1, MSG_PEEK);  // the request has come
    raw.link->cut();
  });
  const std::vector<std::int64_t> one{1};
  CHECK(raw.link->transfer(move(one, one, kTensors, kBlockBytes)).status == LinkStatus::kClosed);
  cutter.join();
  ::close(raw.answers);
  ::close(raw.requests);
}
