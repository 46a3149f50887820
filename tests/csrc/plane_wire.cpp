// SPDX-License-Identifier: Apache-2.0
// Frames, runs and positions: pure functions, also with bytes that nobody sane would send.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "host/plane/pieces.h"
#include "host/plane/wire.h"
#include "plane_testing.h"

using namespace pd;
using pd::testing::move;

namespace {

FrameHeader header_of(const std::vector<std::byte>& frame) {
  const auto header = decode_header(std::span(frame).first<kHeaderBytes>());
  CHECK(header.has_value());
  return *header;
}

Request request(std::vector<SideRun> runs, std::uint64_t num_bytes, std::uint64_t first = 0) {
  return {false, 3, first, num_bytes, 0, 2, std::move(runs)};
}

std::vector<std::uint64_t> walk(PieceCursor cursor, std::size_t ranges, std::uint64_t step) {
  std::vector<std::uint64_t> bytes;  // the address of every byte
  std::vector<iovec> some(ranges);
  while (cursor.remaining() > 0) {
    const std::size_t count = cursor.peek(some, step);
    CHECK(count > 0);
    std::uint64_t moved = 0;
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t k = 0; k < some[i].iov_len; ++k) {
        bytes.push_back(reinterpret_cast<std::uint64_t>(some[i].iov_base) + k);
      }
      moved += some[i].iov_len;
    }
    CHECK(moved <= step);
    cursor.advance(moved);
  }
  return bytes;
}

}  // namespace

TEST(a_request_survives_the_wire) {
  const Request sent = {true, -5, 77, 1234, 3, 9, {{1, 2, 3, -4}, {5, 6, 1, 0}}};
  const auto frame = encode_request(sent, 42);
  const FrameHeader header = header_of(frame);
  CHECK(header.kind == FrameKind::kWrite);
  CHECK_EQUAL(header.sequence, 42u);
  const auto got = decode_request(header, std::span(frame).subspan(kHeaderBytes));
  CHECK(got.has_value());
  CHECK(got->is_write && got->cache_id == -5 && got->first_byte == 77 && got->num_bytes == 1234);
  CHECK(got->tensor_start == 3 && got->tensor_stop == 9 && got->runs.size() == 2);
  CHECK(got->runs[0].stride == -4 && got->runs[1].offset == 5);
}

TEST(a_reply_survives_the_wire_and_its_reason_is_bounded) {
  const auto frame = encode_reply({9, kStatusInvalid, std::string(1000, 'x')}, 1);
  const auto got = decode_reply(std::span(frame).subspan(kHeaderBytes));
  CHECK(got.has_value());
  CHECK(got->num_bytes == 9 && got->status == kStatusInvalid);
  CHECK_EQUAL(got->reason.size(), kMaxReasonBytes);
  CHECK(decode_header(std::span(frame).first<kHeaderBytes>()).has_value());
}

TEST(a_thousand_consecutive_blocks_are_one_run) {
  std::vector<std::int64_t> local(1000), remote(1000);
  for (int i = 0; i < 1000; ++i) {
    local[static_cast<std::size_t>(i)] = 5 + i;
    remote[static_cast<std::size_t>(i)] = 100 + i;
  }
  const PairedRuns runs = pair_runs(move(local, remote, 64, 4096));
  CHECK_EQUAL(runs.remote.size(), 1u);
  CHECK_EQUAL(runs.num_pieces, 1u);
  CHECK_EQUAL(runs.remote[0].bytes, 4096u * 1000);
  CHECK_EQUAL(encode_request(request(runs.remote, 1), 0).size(), kHeaderBytes + kRequestBytes + kRunBytes);
}

TEST(evenly_spaced_blocks_are_one_run_also_backwards) {
  const std::vector<std::int64_t> local{0, 2, 4, 6}, remote{9, 7, 5, 3};
  const PairedRuns runs = pair_runs(move(local, remote, 1, 10));
  CHECK_EQUAL(runs.remote.size(), 1u);
  CHECK_EQUAL(runs.remote[0].count, 4u);
  CHECK_EQUAL(runs.remote[0].stride, -20);
  CHECK_EQUAL(runs.local[0].stride, 20);
  CHECK_EQUAL(runs.num_pieces, 4u);
}

TEST(the_same_source_block_twice_makes_no_overlapping_run) {
  const std::vector<std::int64_t> local{0, 2, 4}, remote{1, 1, 1};
  const PairedRuns runs = pair_runs(move(local, remote, 1, 10));
  CHECK_EQUAL(runs.remote.size(), 3u);
  Request asked = request(runs.remote, 60);
  CHECK_EQUAL(check_request(asked, 2, 20), std::string());
}

TEST(runs_move_exactly_the_pairs_in_order) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const std::size_t count = 1 + random() % 24;
    std::vector<std::int64_t> local(count), remote(count);
    for (std::size_t i = 0; i < count; ++i) {
      const bool follows = i > 0 && random() % 2 == 0;
      local[i] = follows ? local[i - 1] + 1 : static_cast<std::int64_t>(random() % 40);
      remote[i] = follows ? remote[i - 1] + 1 : static_cast<std::int64_t>(random() % 40);
    }
    Transfer transfer = move(local, remote, 2, 8);
    transfer.last_bytes = 1 + random() % 8;
    transfer.remote_base = 3;
    const PairedRuns runs = pair_runs(transfer);
    const std::vector<std::uint64_t> tensors{1'000'000, 2'000'000};
    std::vector<std::uint64_t> expected;
    for (const std::uint64_t tensor : tensors) {
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t size = i + 1 == count ? transfer.last_bytes : 8;
        for (std::uint64_t k = 0; k < size; ++k) {
          expected.push_back(tensor + 3 + static_cast<std::uint64_t>(remote[i]) * 8 + k);
        }
      }
    }
    const std::uint64_t total = expected.size();
    const std::uint64_t first = random() % total;
    const std::uint64_t size = 1 + random() % (total - first);
    const auto got = walk(PieceCursor(tensors, runs.remote, first, size), 1 + random() % 5, 1 + random() % 50);
    CHECK(std::equal(got.begin(), got.end(), expected.begin() + static_cast<std::ptrdiff_t>(first)));
    CHECK_EQUAL(got.size(), size);
  }
}

TEST(the_first_block_outside_is_found) {
  const std::vector<std::int64_t> blocks{0, 3, 4, -1};
  CHECK_EQUAL(find_outside(blocks, 0, 10, 10, 40), 2);
  CHECK_EQUAL(find_outside(blocks, 0, 10, 10, 50), 3);
  CHECK_EQUAL(find_outside(std::span(blocks).first(2), 1, 10, 10, 40), 1);
  CHECK_EQUAL(find_outside(std::span(blocks).first(2), 1, 10, 9, 40), -1);
  const std::vector<std::int64_t> huge{INT64_MAX};
  CHECK_EQUAL(find_outside(huge, UINT64_MAX, UINT64_MAX, 1, UINT64_MAX), 0);
}

TEST(a_checked_request_never_leaves_its_tensors) {
  std::mt19937_64 random(11);
  const std::uint64_t edge[] = {0,          1,         2, 7, 8, 63, 64, 65, 1u << 31, UINT64_MAX, UINT64_MAX - 7,
                                1ull << 63, 1ull << 62};
  const auto pick = [&] { return random() % 4 != 0 ? random() % 20 : edge[random() % std::size(edge)]; };
  int accepted = 0;
  for (int round = 0; round < 200'000; ++round) {
    Request asked = request({}, pick(), pick());
    asked.tensor_start = static_cast<std::uint32_t>(random() % 3);
    asked.tensor_stop = static_cast<std::uint32_t>(random() % 4);
    for (std::size_t i = 0; i < random() % 3; ++i) {
      asked.runs.push_back({pick(), pick(), pick(), static_cast<std::int64_t>(pick())});
    }
    if (!check_request(asked, 2, 64).empty()) continue;
    ++accepted;
    const std::vector<std::uint64_t> tensors{1000, 5000};
    const auto some = std::span(tensors).subspan(asked.tensor_start, asked.tensor_stop - asked.tensor_start);
    for (const std::uint64_t at : walk(PieceCursor(some, asked.runs, asked.first_byte, asked.num_bytes), 3, 40)) {
      CHECK((at >= 1000 && at < 1064) || (at >= 5000 && at < 5064));
    }
  }
  CHECK(accepted > 100);
}

TEST(random_frames_are_decoded_or_refused) {
  std::mt19937 random(5);
  std::vector<std::byte> frame = encode_request(request({{0, 8, 1, 0}, {16, 8, 2, 8}}, 8), 1);
  for (int round = 0; round < 50'000; ++round) {
    std::vector<std::byte> mutated = frame;
    for (unsigned i = 0; i < random() % 5; ++i) mutated[random() % mutated.size()] = static_cast<std::byte>(random());
    const auto header = decode_header(std::span(mutated).first<kHeaderBytes>());
    if (!header) continue;
    CHECK(header->body_bytes <= kMaxBodyBytes);
    const auto body = std::span(mutated).subspan(
        kHeaderBytes, std::min<std::size_t>(header->body_bytes, frame.size() - kHeaderBytes));
    if (const auto got = decode_request(*header, body)) CHECK(got->runs.size() <= 2);
    (void)decode_reply(body);
  }
}
