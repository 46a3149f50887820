// SPDX-License-Identifier: Apache-2.0
// What add() merges, what it refuses, and how much a plan grows.
#include "pd/copy_plan.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "testing.h"

namespace {

using Addresses = std::vector<std::uint64_t>;
using Ids = std::vector<std::int64_t>;

constexpr std::uint64_t kBlock = 4096;
constexpr std::uint64_t kMiB = 1u << 20;
constexpr auto kHighest = std::numeric_limits<std::uint64_t>::max();

// `count` tensors that do not touch each other.
Addresses apart(std::size_t count, std::uint64_t base) {
  Addresses tensors;
  for (std::size_t i = 0; i < count; ++i) tensors.push_back(base + i * i * 64 * kMiB + i * 7 * kMiB);
  return tensors;
}

struct Group {
  Addresses src = apart(4, 1 * kMiB);
  Addresses dst = apart(4, 1 << 30);
  std::uint64_t src_stride = kBlock;
  std::uint64_t dst_stride = kBlock;
  std::vector<pd::BlockSlice> slices = {{0, 0, kBlock}};
  Ids src_shifts = {};
  Ids dst_shifts = {};

  pd::CopyPlan plan(const Ids& from, const Ids& to) const {
    pd::CopyPlan plan;
    add(plan, from, to);
    return plan;
  }
  void add(pd::CopyPlan& plan, const Ids& from, const Ids& to) const {
    plan.add({src, dst, src_stride, dst_stride, from, to, slices, src_shifts, dst_shifts});
  }
};

Ids range(std::int64_t first, std::int64_t count, std::int64_t step = 1) {
  Ids ids;
  for (std::int64_t i = 0; i < count; ++i) ids.push_back(first + i * step);
  return ids;
}

Ids shuffled(std::int64_t count, unsigned seed) {
  Ids ids = range(0, count);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(seed));
  return ids;
}

}  // namespace

TEST(consecutive_blocks_are_one_piece_per_tensor) {
  const pd::CopyPlan plan = Group{}.plan(range(10, 1000), range(5, 1000));
  CHECK_EQUAL(plan.num_runs(), 1u);
  CHECK_EQUAL(plan.num_pieces(), 4u);
  CHECK_EQUAL(plan.num_bytes(), 4000 * kBlock);
  const pd::Run& run = plan.parts()[0].runs[0];
  CHECK_EQUAL(run.src_offset, 10 * kBlock);
  CHECK_EQUAL(run.dst_offset, 5 * kBlock);
  CHECK_EQUAL(run.bytes, 1000 * kBlock);
}

TEST(runs_do_not_grow_with_tensors) {
  Group few, many;
  many.src = apart(128, 1 * kMiB);
  many.dst = apart(128, std::uint64_t{1} << 45);
  const Ids from = shuffled(100, 1), to = shuffled(100, 2);
  CHECK_EQUAL(many.plan(from, to).num_runs(), few.plan(from, to).num_runs());
  CHECK_EQUAL(many.plan(from, to).num_pieces(), 32 * few.plan(from, to).num_pieces());
}

TEST(descending_blocks_on_both_sides_are_one_piece) {
  const pd::CopyPlan plan = Group{}.plan(range(99, 50, -1), range(49, 50, -1));
  CHECK_EQUAL(plan.num_pieces(), 4u);
  CHECK_EQUAL(plan.parts()[0].runs[0].src_offset, 50 * kBlock);
  CHECK_EQUAL(plan.parts()[0].runs[0].dst_offset, 0u);
  CHECK_EQUAL(plan.parts()[0].runs[0].bytes, 50 * kBlock);
}

TEST(evenly_spaced_blocks_are_one_run_of_pieces) {
  const pd::CopyPlan plan = Group{}.plan(range(0, 20, 3), range(40, 20, -1));
  CHECK_EQUAL(plan.num_runs(), 1u);
  CHECK_EQUAL(plan.num_pieces(), 4u * 20);
  CHECK_EQUAL(plan.parts()[0].runs[0].inner_dst_stride, -static_cast<std::int64_t>(kBlock));
}

TEST(two_distant_blocks_do_not_break_a_following_run) {
  const pd::CopyPlan plan = Group{}.plan({7, 100, 101, 102, 103}, {900, 20, 21, 22, 23});
  CHECK_EQUAL(plan.num_runs(), 2u);
  CHECK_EQUAL(plan.num_pieces(), 4u * 2);
}

TEST(neighbours_on_one_side_only_stay_apart) {
  const pd::CopyPlan plan = Group{}.plan({1, 2, 3, 4}, {10, 12, 14, 16});
  CHECK_EQUAL(plan.num_pieces(), 4u * 4);
}

TEST(tensors_that_follow_one_another_on_both_sides_are_one) {
  Group group;
  const std::uint64_t bytes = 8 * kBlock;
  group.src = pd::staging_tensors(1 * kMiB, 6, 8, kBlock);
  group.dst = pd::staging_tensors(1 << 30, 6, 8, kBlock);
  const pd::CopyPlan plan = group.plan(range(0, 8), range(0, 8));
  CHECK_EQUAL(plan.num_pieces(), 1u);
  CHECK_EQUAL(plan.parts()[0].runs[0].bytes, 6 * bytes);
  CHECK_EQUAL(plan.num_bytes(), 6 * bytes);
}

TEST(tensors_that_follow_on_one_side_only_stay_apart) {
  Group group;
  group.dst = pd::staging_tensors(1 << 30, 4, 8, kBlock);
  CHECK_EQUAL(group.plan(range(0, 8), range(0, 8)).num_pieces(), 4u);
  std::swap(group.src, group.dst);
  CHECK_EQUAL(group.plan(range(0, 8), range(0, 8)).num_pieces(), 4u);
}

TEST(layers_inside_a_block_are_one_piece_per_block) {  // all layers of a block lie together
  Group group;
  group.src = pd::staging_tensors(1 * kMiB, 4, 1, kBlock);
  group.dst = pd::staging_tensors(1 << 30, 4, 1, kBlock);
  group.src_stride = group.dst_stride = 4 * kBlock;
  const pd::CopyPlan scattered = group.plan({3, 9, 4}, {1, 0, 7});
  CHECK_EQUAL(scattered.num_pieces(), 3u);
  CHECK_EQUAL(scattered.parts()[0].runs[0].bytes, 4 * kBlock);
  CHECK_EQUAL(group.plan(range(3, 9), range(0, 9)).num_pieces(), 1u);
}

TEST(keys_and_values_that_lie_together_are_one_piece_per_layer) {
  Group group;
  group.src = {kMiB, kMiB + kBlock, 64 * kMiB, 64 * kMiB + kBlock};
  group.dst = {1 << 30, (1 << 30) + kBlock, 1 << 28, (1 << 28) + kBlock};
  group.src_stride = group.dst_stride = 2 * kBlock;
  const pd::CopyPlan plan = group.plan(range(0, 10), range(7, 10));
  CHECK_EQUAL(plan.num_pieces(), 2u);
  CHECK_EQUAL(plan.parts()[0].src_tensors.size(), 2u);
}

TEST(adjacent_slices_are_one_piece) {
  Group group;
  group.slices = {{0, 0, 1024}, {1024, 1024, 1024}, {2048, 2048, 2048}};
  const pd::CopyPlan plan = group.plan(range(0, 5), range(5, 5));
  CHECK_EQUAL(plan.num_runs(), 1u);
  CHECK_EQUAL(plan.num_pieces(), 4u);
}

TEST(slices_in_even_steps_are_one_run) {  // two of eight heads, given token by token
  Group group;
  group.slices.clear();
  for (std::uint64_t token = 0; token < 16; ++token) group.slices.push_back({token * 256 + 64, token * 64, 64});
  group.dst_stride = 1024;  // 16 tokens of 64 bytes
  const pd::CopyPlan plan = group.plan({1, 5, 3}, {0, 9, 4});
  CHECK_EQUAL(plan.num_runs(), 3u);
  CHECK_EQUAL(plan.num_pieces(), 4u * 3 * 16);
}

TEST(head_slices_of_consecutive_blocks_are_one_run) {  // the tokens of the next block go on at the same distance
  Group group;
  group.slices = {{64, 0, 64, 16, 256, 64}};
  group.dst_stride = 1024;  // 16 tokens of 64 bytes
  const pd::CopyPlan plan = group.plan(range(4, 50), range(0, 50));
  CHECK_EQUAL(plan.num_runs(), 1u);
  const pd::Run& run = plan.parts()[0].runs[0];
  CHECK_EQUAL(run.inner_count, 16u * 50);
  CHECK_EQUAL(run.outer_count, 1u);
}

TEST(tokens_of_a_block_with_a_gap_need_two_dimensions) {
  Group group;
  group.slices = {{0, 0, 64, 8, 128, 128}};  // half of the block's tokens
  const pd::CopyPlan plan = group.plan(range(0, 10), range(10, 10));
  CHECK_EQUAL(plan.num_runs(), 1u);
  CHECK_EQUAL(plan.parts()[0].runs[0].outer_count, 10u);
  CHECK_EQUAL(plan.num_pieces(), 4u * 80);
}

TEST(blocks_of_unlike_sizes_are_runs_of_units) {  // 16 tokens a block to 128, heads before tokens: by shifts
  Group group;
  const std::uint64_t head = 1024;  // 16 tokens of 64 bytes
  group.slices = {{0, 0, head, 8, static_cast<std::int64_t>(head), static_cast<std::int64_t>(8 * head)}};
  group.src_stride = 8 * head;
  group.dst_stride = 64 * head;
  Ids to;
  for (std::int64_t i = 0; i < 16; ++i) {
    to.push_back(i / 8);
    group.dst_shifts.push_back(i % 8 * static_cast<std::int64_t>(head));
  }
  const pd::CopyPlan plan = group.plan(range(0, 16), to);
  CHECK_EQUAL(plan.num_runs(), 2u);           // one per block of the larger size
  CHECK_EQUAL(plan.num_bytes(), 512 * head);  // 4 tensors, 16 blocks, 8 heads
}

TEST(nothing_to_move_is_an_empty_plan) {
  Group group;
  CHECK_EQUAL(group.plan({}, {}).num_runs(), 0u);
  group.src.clear(), group.dst.clear();
  CHECK_EQUAL(group.plan({1}, {1}).num_bytes(), 0u);
}

TEST(refuses_what_does_not_fit_together) {
  CHECK_THROWS(std::invalid_argument, "2 source blocks and 1 destination blocks", Group{}.plan({1, 2}, {1}));
  CHECK_THROWS(std::invalid_argument, "negative block id", Group{}.plan({1, -2}, {1, 2}));
  CHECK_THROWS(std::invalid_argument, "negative block id", Group{}.plan({1, 2}, {-1, 2}));
  Group group;
  group.src.pop_back();
  CHECK_THROWS(std::invalid_argument, "3 source tensors and 4", group.plan({1}, {1}));
  group = {};
  group.slices = {{0, 0, 0}};
  CHECK_THROWS(std::invalid_argument, "zero bytes", group.plan({1}, {1}));
  group.slices = {{0, 0, 1, 0}};
  CHECK_THROWS(std::invalid_argument, "zero pieces", group.plan({1}, {1}));
  group.slices = {{0, 0, 8, 2, -8, 8}};
  CHECK_THROWS(std::invalid_argument, "begins before", group.plan({1}, {1}));
  group = {};
  group.src_stride = 0;
  CHECK_THROWS(std::invalid_argument, "stride of zero", group.plan({1, 2}, {1, 2}));
  group = {};
  group.dst_shifts = {1};
  CHECK_THROWS(std::invalid_argument, "shift per block", group.plan({1, 2}, {1, 2}));
  group.dst_shifts = {1, -1};
  CHECK_THROWS(std::invalid_argument, "negative shift", group.plan({1, 2}, {1, 2}));
}

TEST(refuses_addresses_that_overflow) {
  const std::int64_t highest_id = std::numeric_limits<std::int64_t>::max();
  CHECK_THROWS(std::invalid_argument, "does not fit", Group{}.plan({highest_id}, {1}));
  CHECK_THROWS(std::invalid_argument, "does not fit", Group{}.plan({1}, {highest_id}));
  Group group;
  group.dst.back() = kHighest - kBlock;
  CHECK_THROWS(std::invalid_argument, "does not fit", group.plan({0, 1}, {0, 1}));
  CHECK_EQUAL(group.plan({0}, {0}).num_pieces(), 4u);  // its last byte is the last address
  group = {};
  group.slices = {{kHighest, 0, 2}};
  CHECK_THROWS(std::invalid_argument, "does not fit", group.plan({0}, {0}));
  group.slices = {{0, 0, std::uint64_t{1} << 62, 8, std::int64_t{1} << 62, 0}};
  CHECK_THROWS(std::invalid_argument, "does not fit", group.plan({0}, {0}));
  group.slices = {{0, 0, std::uint64_t{1} << 63}};
  CHECK_THROWS(std::invalid_argument, "more than", group.plan({0}, {0}));
}

TEST(a_refused_group_leaves_the_plan_as_it_was) {
  pd::CopyPlan plan = Group{}.plan({1}, {1});
  CHECK_THROWS(std::invalid_argument, "negative", Group{}.add(plan, {1, -1}, {1, 1}));
  CHECK_EQUAL(plan.parts().size(), 1u);
  CHECK_EQUAL(plan.num_bytes(), 4 * kBlock);
  CHECK_EQUAL(plan.num_pairs(), 1u);
}

TEST(building_takes_microseconds_per_hundred_blocks) {  // printed, never asserted
  using Clock = std::chrono::steady_clock;
  for (const bool random : {false, true}) {
    const Ids from = random ? shuffled(1000, 1) : range(0, 1000), to = random ? shuffled(1000, 2) : range(0, 1000);
    Group group;
    group.src = apart(128, kMiB), group.dst = apart(128, std::uint64_t{1} << 45);
    double best = 1e9;
    std::uint64_t runs = 0;
    for (int i = 0; i < 200; ++i) {
      const auto start = Clock::now();
      runs = group.plan(from, to).num_runs();
      best = std::min(best, std::chrono::duration<double, std::nano>(Clock::now() - start).count());
    }
    std::printf("%s ids: %.1f ns/block, %llu runs\n", random ? "random" : "consecutive", best / 1000,
                static_cast<unsigned long long>(runs));
    CHECK(runs <= 1000);
  }
}
