// SPDX-License-Identifier: Apache-2.0
// Random plans against a bytewise copy: every way of execution, guard bytes, checksums, deadlines and cancellation.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "host/copy/walk.h"
#include "pd/copy_engine.h"
#include "pd/crc32c.h"
#include "testing.h"

namespace {

using Bytes = std::vector<unsigned char>;
using Ids = std::vector<std::int64_t>;

constexpr std::size_t kNumTensors = 3;

std::uint64_t address_of(const Bytes& bytes) { return reinterpret_cast<std::uint64_t>(bytes.data()); }

// Tensors of both sides with random contents, and one group of block pairs between them.
struct Scene {
  Scene(std::mt19937& random_source, std::uint64_t block_bytes, std::int64_t num_blocks) : random(random_source) {
    for (std::size_t i = 0; i < kNumTensors; ++i) {
      src.emplace_back(block_bytes * static_cast<std::uint64_t>(num_blocks) + 128);
      dst.emplace_back(src.back().size());
      for (unsigned char& byte : src.back()) byte = static_cast<unsigned char>(random());
    }
    stride = block_bytes;
    slices = {{0, 0, block_bytes}};
    for (std::int64_t i = 0; i < num_blocks; ++i) from.push_back(i), to.push_back(i);
    std::shuffle(from.begin(), from.end(), random);
    std::shuffle(to.begin(), to.end(), random);
    if (random() % 2 == 0) std::sort(from.begin() + num_blocks / 3, from.end());
    if (random() % 2 == 0) std::sort(to.begin() + num_blocks / 3, to.end());
    const auto moved = static_cast<std::size_t>(num_blocks - num_blocks / 4);  // the other blocks guard
    from.resize(moved), to.resize(moved);
  }

  void add_to(pd::CopyPlan& plan) const {
    std::vector<std::uint64_t> src_tensors, dst_tensors;
    for (std::size_t i = 0; i < kNumTensors; ++i) {
      src_tensors.push_back(address_of(src[i]) + 64);
      dst_tensors.push_back(address_of(dst[i]) + 64);
    }
    plan.add({src_tensors, dst_tensors, stride, stride, from, to, slices});
  }

  std::vector<Bytes> wanted() const {
    std::vector<Bytes> result = dst;
    for (std::size_t tensor = 0; tensor < kNumTensors; ++tensor) {
      for (std::size_t i = 0; i < from.size(); ++i) {
        for (const pd::BlockSlice& slice : slices) {
          for (std::uint64_t k = 0; k < slice.inner_count; ++k) {
            const auto at = [&](std::int64_t block, std::uint64_t offset, std::int64_t step) {
              return 64 + static_cast<std::uint64_t>(block) * stride + offset + k * static_cast<std::uint64_t>(step);
            };
            std::memcpy(&result[tensor][at(to[i], slice.dst_offset, slice.inner_dst_stride)],
                        &src[tensor][at(from[i], slice.src_offset, slice.inner_src_stride)], slice.bytes);
          }
        }
      }
    }
    return result;
  }

  std::mt19937& random;
  std::vector<Bytes> src, dst;
  std::uint64_t stride;
  std::vector<pd::BlockSlice> slices;
  Ids from, to;
};

// Disjoint slices at the same place on both sides or swapped, within a block.
std::vector<pd::BlockSlice> random_slices(std::mt19937& random, std::uint64_t block_bytes) {
  const std::uint64_t units = 1 + random() % 6, unit = block_bytes / (2 * units);
  if (unit < 2) return {{0, 0, block_bytes}};
  const auto step = static_cast<std::int64_t>(2 * unit);
  switch (random() % 4) {
    case 0:
      return {{0, unit, unit, units, step, step}};
    case 1:
      return {{2 * unit * (units - 1), 0, unit - 1, units, -step, step}};
    case 2:
      return {{0, unit, unit}, {unit, 0, unit}};
    default:
      return {{0, 0, block_bytes}};
  }
}

std::vector<std::uint32_t> naive_checksums(const Scene& scene) {
  std::vector<std::uint32_t> result;
  for (const std::int64_t block : scene.from) {
    std::vector<std::uint32_t> tensors;
    for (const Bytes& bytes : scene.src) {
      std::uint32_t crc = 0;
      for (const pd::BlockSlice& slice : scene.slices) {
        for (std::uint64_t k = 0; k < slice.inner_count; ++k) {
          const std::uint64_t offset = 64 + static_cast<std::uint64_t>(block) * scene.stride + slice.src_offset +
                                       k * static_cast<std::uint64_t>(slice.inner_src_stride);
          crc = pd::crc32c(crc, &bytes[offset], slice.bytes);
        }
      }
      tensors.push_back(crc);
    }
    result.push_back(pd::crc32c(0, tensors.data(), 4 * tensors.size()));
  }
  return result;
}

}  // namespace

TEST(random_plans_move_exactly_their_bytes) {
  std::mt19937 random(11);
  for (int round = 0; round < 150; ++round) {
    const std::uint64_t sizes[] = {2, 64, 100, 1000, 4096, 20000};
    Scene scene(random, sizes[random() % 6], 1 + static_cast<std::int64_t>(random() % 40));
    scene.slices = random_slices(random, scene.stride);
    const std::vector<Bytes> wanted = scene.wanted();
    pd::CopyPlan plan;
    scene.add_to(plan);
    pd::CopyOptions options;
    options.stores = static_cast<pd::Stores>(random() % 3);
    CHECK(pd::execute(plan, options) == pd::CopyState::kDone);
    CHECK(scene.dst == wanted);
  }
}

TEST(long_pieces_are_shared_out_without_a_gap) {  // one piece over many chunks, after small ones
  std::mt19937 random(12);
  Scene small(random, 3000, 7), large(random, 300001, 9);
  large.from.clear(), large.to.clear();
  for (std::int64_t i = 0; i < 8; ++i) large.from.push_back(i), large.to.push_back(i + 1);
  const std::vector<Bytes> wanted_small = small.wanted(), wanted_large = large.wanted();
  pd::CopyPlan plan;
  small.add_to(plan), large.add_to(plan);
  CHECK(pd::PlanWalk(plan).num_chunks() > 10);
  CHECK(pd::execute(plan) == pd::CopyState::kDone);
  CHECK(small.dst == wanted_small);
  CHECK(large.dst == wanted_large);
}

TEST(chunks_are_disjoint) {  // in any order, each once, they are the plan: nothing is copied by two of them
  std::mt19937 random(13);
  Scene scene(random, 200000, 12);
  const std::vector<Bytes> wanted = scene.wanted();
  pd::CopyPlan plan;
  scene.add_to(plan);
  const pd::PlanWalk walk(plan);
  static std::uint64_t moved;
  moved = 0;
  const auto copy_row = [](const pd::PieceRow& row) {
    moved += row.bytes * row.count;
    pd::kPortableKernel.copy_temporal(row);
  };
  for (std::uint64_t chunk = walk.num_chunks(); chunk-- > 0;) walk.copy_chunk(chunk, copy_row);
  CHECK_EQUAL(moved, plan.num_bytes());
  CHECK(scene.dst == wanted);
}

TEST(checksums_are_the_same_however_the_bytes_lie) {
  std::mt19937 random(14);
  for (int round = 0; round < 60; ++round) {
    const std::uint64_t sizes[] = {2, 100, 4096, 20000};
    Scene scene(random, sizes[random() % 4], 1 + static_cast<std::int64_t>(random() % 20));
    scene.slices = random_slices(random, scene.stride);
    const std::vector<std::uint32_t> expected = naive_checksums(scene);
    const std::vector<Bytes> wanted = scene.wanted();
    pd::CopyPlan plan(pd::Checksums::kPerPair);
    scene.add_to(plan);
    std::vector<std::uint32_t> copied(plan.num_pairs()), source(plan.num_pairs()), destination(plan.num_pairs());
    pd::checksum(plan, pd::Side::kSource, source);
    pd::CopyOptions options;
    options.stores = static_cast<pd::Stores>(random() % 3);
    options.checksums = copied;
    CHECK(pd::execute(plan, options) == pd::CopyState::kDone);
    pd::checksum(plan, pd::Side::kDestination, destination);
    CHECK(scene.dst == wanted);
    CHECK(copied == expected);
    CHECK(source == expected);
    CHECK(destination == expected);
  }
}

TEST(a_flipped_bit_changes_its_pairs_checksum_only) {
  std::mt19937 random(15);
  Scene scene(random, 1000, 8);
  pd::CopyPlan plan(pd::Checksums::kPerPair);
  scene.add_to(plan);
  std::vector<std::uint32_t> before(plan.num_pairs()), after(plan.num_pairs());
  pd::checksum(plan, pd::Side::kSource, before);
  scene.src[1][64 + static_cast<std::size_t>(scene.from[2]) * 1000 + 999] ^= 0x10;
  pd::checksum(plan, pd::Side::kSource, after);
  for (std::size_t i = 0; i < before.size(); ++i) CHECK((before[i] == after[i]) == (i != 2));
}

TEST(a_destination_that_differs_from_its_source_has_another_checksum) {
  std::mt19937 random(18);
  Scene scene(random, 1000, 8);
  pd::CopyPlan plan(pd::Checksums::kPerPair);
  scene.add_to(plan);
  std::vector<std::uint32_t> source(plan.num_pairs()), destination(plan.num_pairs());
  pd::CopyOptions options;
  options.checksums = source;
  CHECK(pd::execute(plan, options) == pd::CopyState::kDone);
  scene.dst[2][64 + static_cast<std::size_t>(scene.to[1]) * 1000] ^= 0x01;
  pd::checksum(plan, pd::Side::kDestination, destination);
  for (std::size_t i = 0; i < source.size(); ++i) CHECK((source[i] == destination[i]) == (i != 1));
}

TEST(places_for_checksums_must_fit_the_plan) {
  std::mt19937 random(16);
  const Scene scene(random, 64, 4);
  pd::CopyPlan plain, checked(pd::Checksums::kPerPair);
  scene.add_to(plain), scene.add_to(checked);
  std::vector<std::uint32_t> places(2);
  pd::CopyOptions options;
  CHECK_THROWS(std::invalid_argument, "0 places for the checksums of a plan with 3", pd::execute(checked, options));
  options.checksums = places;
  CHECK_THROWS(std::invalid_argument, "2 places", pd::execute(checked, options));
  CHECK_THROWS(std::invalid_argument, "of a plan with 0", pd::execute(plain, options));
}

TEST(nothing_is_written_after_the_deadline_or_a_cancellation) {
  std::mt19937 random(17);
  Scene scene(random, 4096, 20);
  const std::vector<Bytes> before = scene.dst;
  pd::CopyPlan plan;
  scene.add_to(plan);
  pd::CopyOptions options;
  options.deadline = std::chrono::steady_clock::now();
  CHECK(pd::execute(plan, options) == pd::CopyState::kDeadline);
  const std::atomic<bool> cancelled{true};
  options = {};
  options.cancel = &cancelled;
  CHECK(pd::execute(plan, options) == pd::CopyState::kCancelled);
  CHECK(scene.dst == before);
}

TEST(an_empty_plan_is_done) { CHECK(pd::execute(pd::CopyPlan{}) == pd::CopyState::kDone); }
