// SPDX-License-Identifier: Apache-2.0
// The serving side alone: many links on few threads, peers that stall or talk nonsense, caches that go.
#include <fcntl.h>

#include <atomic>
#include <random>

#include "host/plane/wire.h"
#include "plane_testing.h"

using namespace pd;
using namespace pd::testing;

namespace {

constexpr std::size_t kTensors = 2, kBlocks = 64, kBlockBytes = 65536;

Request request(std::uint64_t num_bytes, std::vector<SideRun> runs) {
  return {false, 1, 0, num_bytes, 0, kTensors, std::move(runs)};
}

void say(int fd, const std::vector<std::byte>& bytes) { (void)!::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL); }

bool ends(int fd) {
  timeval limit{5, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  char some[4096];
  ssize_t got = 1;
  while ((got = ::recv(fd, some, sizeof(some), 0)) > 0) {
  }
  return got == 0 || errno == ECONNRESET;
}

}  // namespace

TEST(two_hundred_links_are_served_by_two_threads) {
  Memory memory(kTensors, 4, 4096, 1);
  Memory target(kTensors, 4, 4096, 2);
  Plane server(2, milliseconds(5000), nullptr);
  server.add_cache(memory.cache(1));
  Plane client(1, milliseconds(5000), nullptr);
  client.add_cache(target.cache(1));
  std::vector<Ends> links;
  for (int i = 0; i < 200; ++i) {
    links.push_back(connect(client, server, 2));
    links.back().ours->add_remote_cache({1, kTensors, memory.tensor_bytes(), {}});
  }
  CHECK_EQUAL(server.stats().connections, 400u);
  std::atomic<int> good{0};
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const std::vector<std::int64_t> block{t};
      for (int i = 0; i < 200; ++i) {
        Transfer transfer = move(block, block, kTensors, 4096);
        if (links[static_cast<std::size_t>(i)].ours->transfer(transfer).status == LinkStatus::kOk) ++good;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQUAL(good.load(), 800);
  for (std::size_t t = 0; t < kTensors; ++t) {
    for (std::size_t b = 0; b < 4; ++b) CHECK(std::memcmp(target.block(t, b), memory.block(t, b), 4096) == 0);
  }
  for (Ends& link : links) link.ours->close(in(1000));
  wait_until([&] { return server.stats().connections == 0; });
}

TEST(a_stalled_peer_holds_up_nobody_and_is_dropped_in_time) {
  Memory memory(kTensors, kBlocks, kBlockBytes, 1);
  Memory target(kTensors, kBlocks, kBlockBytes, 2);
  Plane server(1, milliseconds(300), nullptr);
  server.add_cache(memory.cache(1));
  RawPeer stalled = connect_raw(server);
  say(stalled.requests,
      encode_request(request(kTensors * memory.tensor_bytes(), {{0, memory.tensor_bytes(), 1, 0}}), 1));
  wait_until([&] { return server.stats().bytes > 0; });
  Plane client(1, milliseconds(5000), nullptr);
  client.add_cache(target.cache(1));
  Ends other = connect(client, server, 1);
  other.ours->add_remote_cache({1, kTensors, memory.tensor_bytes(), {}});
  const std::vector<std::int64_t> block{3};
  CHECK(other.ours->transfer(move(block, block, kTensors, kBlockBytes)).status == LinkStatus::kOk);
  const auto event = server.wait_event(in(5000));
  CHECK(event.has_value() && event->kind == LinkEvent::kBroken && event->link_id == stalled.link->id());
  CHECK_EQUAL(server.stats().stalled, 1u);
  CHECK(ends(stalled.requests));
  CHECK(server.remove_cache(1, in(1000)));
  ::close(stalled.answers);
  ::close(stalled.requests);
}

TEST(a_cache_goes_when_nothing_touches_it_any_more) {
  Memory memory(kTensors, kBlocks, kBlockBytes, 1);
  Plane server(1, milliseconds(500), nullptr);
  server.add_cache(memory.cache(1));
  CHECK_THROWS(std::invalid_argument, "exists already", server.add_cache(memory.cache(1)));
  CHECK_THROWS(std::invalid_argument, "cache 2", server.add_cache({2, {}, 5, true}));
  RawPeer raw = connect_raw(server);
  say(raw.requests, encode_request(request(kTensors * memory.tensor_bytes(), {{0, memory.tensor_bytes(), 1, 0}}), 1));
  wait_until([&] { return server.stats().bytes > 0; });
  CHECK(!server.remove_cache(1, in(0)));    // the answer has not been read
  CHECK(server.remove_cache(1, in(5000)));  // the peer has been dropped
  CHECK(server.remove_cache(1, in(0)));     // unknown: nothing touches it
  ::close(raw.answers);
  ::close(raw.requests);
}

TEST(an_answer_on_its_way_ends_before_the_farewell) {
  Memory memory(kTensors, kBlocks, kBlockBytes, 1);
  Plane server(1, milliseconds(5000), nullptr);
  server.add_cache(memory.cache(1));
  RawPeer raw = connect_raw(server);
  const std::uint64_t size = kTensors * memory.tensor_bytes();
  say(raw.requests, encode_request(request(size, {{0, memory.tensor_bytes(), 1, 0}}), 1));
  wait_until([&] { return server.stats().bytes > 0; });
  std::thread closer([&] { raw.link->close(in(5000)); });
  std::vector<char> got(kHeaderBytes + kReplyBytes + size + kHeaderBytes);
  CHECK(::recv(raw.requests, got.data(), got.size(), MSG_WAITALL) == static_cast<ssize_t>(got.size()));
  closer.join();
  CHECK(std::memcmp(got.data() + kHeaderBytes + kReplyBytes, memory.block(0, 0), memory.tensor_bytes()) == 0);
  const auto bye = encode_bye();
  CHECK(std::memcmp(got.data() + got.size() - kHeaderBytes, bye.data(), kHeaderBytes) == 0);
  CHECK(ends(raw.requests));
  ::close(raw.answers);
  ::close(raw.requests);
}

TEST(nonsense_ends_a_link_and_nothing_else) {
  Memory memory(kTensors, kBlocks, kBlockBytes, 1);
  Plane server(2, milliseconds(200), nullptr);
  server.add_cache(memory.cache(1));
  std::mt19937 random(3);
  const std::vector<std::byte> good = encode_request(request(64, {{0, 16, 2, 32}, {128, 32, 1, 0}}), 1);
  for (int round = 0; round < 300; ++round) {
    RawPeer raw = connect_raw(server);
    std::vector<std::byte> data = good;
    data.insert(data.end(), good.begin(), good.end());
    for (unsigned i = 0; i < random() % 6; ++i) data[random() % data.size()] = static_cast<std::byte>(random());
    data.resize(1 + random() % data.size());
    if (round % 5 == 0) {
      for (std::byte& byte : data) byte = static_cast<std::byte>(random());
    }
    say(raw.requests, data);
    ::shutdown(raw.requests, SHUT_WR);
    CHECK(ends(raw.requests));
    ::close(raw.answers);
    ::close(raw.requests);
  }
  Memory target(kTensors, kBlocks, kBlockBytes, 2);
  Plane client(1, milliseconds(5000), nullptr);
  client.add_cache(target.cache(1));
  Ends other = connect(client, server, 2);
  other.ours->add_remote_cache({1, kTensors, memory.tensor_bytes(), {}});
  const std::vector<std::int64_t> block{3};
  CHECK(other.ours->transfer(move(block, block, kTensors, kBlockBytes)).status == LinkStatus::kOk);
}

TEST(memory_that_is_not_there_ends_the_link_not_the_process) {
  Plane server(1, milliseconds(2000), nullptr);
  server.add_cache({1, {4096, 8192}, 4096, true});
  RawPeer raw = connect_raw(server);
  say(raw.requests, encode_request({false, 1, 0, 4096, 0, 1, {{0, 4096, 1, 0}}}, 1));
  CHECK(ends(raw.requests));
  const auto event = server.wait_event(in(5000));
  CHECK(event.has_value() && event->kind == LinkEvent::kBroken);
  ::close(raw.answers);
  ::close(raw.requests);
}

TEST(a_plane_that_ends_closes_its_links_and_descriptors) {
  const auto count = [] {
    int open = 0;
    for (int fd = 0; fd < 2000; ++fd) open += ::fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
    return open;
  };
  const int before = count();
  for (int round = 0; round < 3; ++round) {
    std::shared_ptr<Link> outlives;
    {
      Plane one(2, milliseconds(1000), nullptr);
      Plane two(2, milliseconds(1000), nullptr);
      outlives = connect(one, two, 3).ours;
    }
    outlives->close(in(100));
    CHECK_THROWS(std::invalid_argument, "1..16 connections", Plane(1, milliseconds(1), nullptr).open_link({}, {}, 0));
  }
  CHECK_EQUAL(count(), before);
}
