// SPDX-License-Identifier: Apache-2.0
#include "pd/copy_plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "pd/check.h"
#include "slices.h"

namespace pd {
namespace {

// Byte offsets of a side's blocks from a tensor's base.
class BlockOffsets {
 public:
  BlockOffsets(std::span<const std::int64_t> blocks, std::span<const std::int64_t> shifts, std::uint64_t stride)
      : blocks_(blocks), shifts_(shifts), stride_(stride) {}

  std::uint64_t operator[](std::size_t i) const {
    const std::uint64_t shift = shifts_.empty() ? 0 : static_cast<std::uint64_t>(shifts_[i]);
    return static_cast<std::uint64_t>(blocks_[i]) * stride_ + shift;
  }

  // The largest one. Throws for negative ids and shifts, and where it does not fit.
  std::uint64_t check(const char* what) const {
    std::int64_t largest_block = 0, largest_shift = 0, signs = 0;
    for (const std::int64_t block : blocks_) largest_block = std::max(largest_block, block), signs |= block;
    require(signs >= 0, "a negative block id");
    for (const std::int64_t shift : shifts_) largest_shift = std::max(largest_shift, shift), signs |= shift;
    require(signs >= 0, "a negative shift");
    return add_checked(multiply_checked(static_cast<std::uint64_t>(largest_block), stride_, what),
                       static_cast<std::uint64_t>(largest_shift), what);
  }

 private:
  std::span<const std::int64_t> blocks_;
  std::span<const std::int64_t> shifts_;
  std::uint64_t stride_;
};

void require_as_many(std::size_t src, std::size_t dst, const char* what) {
  if (src != dst) {
    throw std::invalid_argument(std::to_string(src) + " source " + what + " and " + std::to_string(dst) +
                                " destination " + what);
  }
}

void check_lengths(const BlockPairs& pairs) {
  require_as_many(pairs.src_tensors.size(), pairs.dst_tensors.size(), "tensors");
  require_as_many(pairs.src_blocks.size(), pairs.dst_blocks.size(), "blocks");
  require(pairs.src_shifts.empty() || pairs.src_shifts.size() == pairs.src_blocks.size(), "not a shift per block");
  require(pairs.dst_shifts.empty() || pairs.dst_shifts.size() == pairs.dst_blocks.size(), "not a shift per block");
  const bool one_block = pairs.src_blocks.size() <= 1;
  require(one_block || (pairs.src_block_stride > 0 && pairs.dst_block_stride > 0), "a block stride of zero");
}

// Tensors that lie one after the other on both sides, `bytes` apart, count as one: tables keep every m-th of them.
// Returns m.
std::size_t join_tensors(Part& part, std::uint64_t bytes) {
  const auto& src = part.src_tensors;
  const auto& dst = part.dst_tensors;
  const auto is_adjacent = [&](std::size_t i) { return src[i + 1] - src[i] == bytes && dst[i + 1] - dst[i] == bytes; };
  std::size_t group = 1;
  while (group < src.size() && is_adjacent(group - 1)) ++group;
  if (group == 1 || src.size() % group != 0) return 1;
  for (std::size_t i = 0; i + 1 < src.size(); ++i) {
    if ((i + 1) % group != 0 && !is_adjacent(i)) return 1;
  }
  const std::size_t kept = src.size() / group;
  for (std::size_t i = 0; i < kept; ++i) {
    part.src_tensors[i] = part.src_tensors[i * group];
    part.dst_tensors[i] = part.dst_tensors[i * group];
  }
  part.src_tensors.resize(kept);
  part.dst_tensors.resize(kept);
  return group;
}

// `count` blocks at even distances.
struct BlockGroup {
  std::uint64_t src = 0;
  std::uint64_t dst = 0;
  std::size_t count = 1;
  std::int64_t src_step = 0;
  std::int64_t dst_step = 0;
};

Run make_run(const BlockGroup& blocks, const BlockSlice& slice) {
  Run run{blocks.src + slice.src_offset, blocks.dst + slice.dst_offset, slice.bytes, slice.inner_count,
          slice.inner_src_stride,        slice.inner_dst_stride};
  if (blocks.count == 1) return run;
  const auto bytes = static_cast<std::int64_t>(slice.bytes);
  // How far the next repetition of the slice would begin, were there one; may wrap, and is then no block's distance.
  const auto src_next =
      static_cast<std::int64_t>(slice.inner_count * static_cast<std::uint64_t>(slice.inner_src_stride));
  const auto dst_next =
      static_cast<std::int64_t>(slice.inner_count * static_cast<std::uint64_t>(slice.inner_dst_stride));
  if (slice.inner_count == 1 && blocks.src_step == bytes && blocks.dst_step == bytes) {
    run.bytes *= blocks.count;
  } else if (slice.inner_count == 1) {
    run.inner_count = blocks.count;
    run.inner_src_stride = blocks.src_step;
    run.inner_dst_stride = blocks.dst_step;
  } else if (blocks.src_step == src_next && blocks.dst_step == dst_next) {
    run.inner_count *= blocks.count;
  } else {
    run.outer_count = blocks.count;
    run.outer_src_stride = blocks.src_step;
    run.outer_dst_stride = blocks.dst_step;
  }
  return run;
}

// Groups of consecutive pairs. Two pairs make a group only if they are neighbours in memory order on both sides: any
// two have some distance, and taking them for a pattern would break real ones apart.
class BlockGrouping {
 public:
  BlockGrouping(const BlockPairs& pairs, const BlockOffsets& src, const BlockOffsets& dst)
      : src_(src),
        dst_(dst),
        count_(pairs.src_blocks.size()),
        src_stride_(static_cast<std::int64_t>(pairs.src_block_stride)),
        dst_stride_(static_cast<std::int64_t>(pairs.dst_block_stride)) {}

  bool is_done() const { return next_ == count_; }

  BlockGroup take() {
    const std::size_t first = next_;
    BlockGroup group{src_[first], dst_[first]};
    std::size_t end = first + 1;
    if (end < count_) {
      const auto src_step = src_distance(first), dst_step = dst_distance(first);
      const auto continues = [&](std::size_t i) { return src_distance(i) == src_step && dst_distance(i) == dst_step; };
      const bool neighbours = (src_step == src_stride_ && dst_step == dst_stride_) ||
                              (src_step == -src_stride_ && dst_step == -dst_stride_);
      if (neighbours || (end + 1 < count_ && continues(end))) {
        while (end < count_ && continues(end - 1)) ++end;
        group.src_step = src_step;
        group.dst_step = dst_step;
      }
    }
    group.count = end - first;
    next_ = end;
    if (group.src_step < 0 && group.dst_step < 0) {  // from the other end it is the same, ascending
      group.src = src_[end - 1];
      group.dst = dst_[end - 1];
      group.src_step = -group.src_step;
      group.dst_step = -group.dst_step;
    }
    return group;
  }

 private:
  std::int64_t src_distance(std::size_t i) const { return static_cast<std::int64_t>(src_[i + 1] - src_[i]); }
  std::int64_t dst_distance(std::size_t i) const { return static_cast<std::int64_t>(dst_[i + 1] - dst_[i]); }

  const BlockOffsets& src_;
  const BlockOffsets& dst_;
  std::size_t count_;
  std::int64_t src_stride_;
  std::int64_t dst_stride_;
  std::size_t next_ = 0;
};

Part make_part(const BlockPairs& pairs, const BlockOffsets& src, const BlockOffsets& dst) {
  Part part;
  part.src_tensors.assign(pairs.src_tensors.begin(), pairs.src_tensors.end());
  part.dst_tensors.assign(pairs.dst_tensors.begin(), pairs.dst_tensors.end());
  std::vector<BlockSlice> slices = merge_slices(pairs.slices);
  if (slices.size() == 1 && slices[0].inner_count == 1) slices[0].bytes *= join_tensors(part, slices[0].bytes);
  for (BlockGrouping grouping(pairs, src, dst); !grouping.is_done();) {
    const BlockGroup blocks = grouping.take();
    for (const BlockSlice& slice : slices) part.runs.push_back(make_run(blocks, slice));
  }
  if (part.runs.size() == 1 && part.runs[0].num_pieces() == 1) {
    part.runs[0].bytes *= join_tensors(part, part.runs[0].bytes);
  }
  part.run_ends.reserve(part.runs.size());
  for (const Run& run : part.runs) part.run_ends.push_back(part.tensor_bytes() + run.bytes * run.num_pieces());
  return part;
}

CheckedGroup make_checked_group(const BlockPairs& pairs, const BlockOffsets& src, const BlockOffsets& dst) {
  CheckedGroup group;
  group.src_tensors.assign(pairs.src_tensors.begin(), pairs.src_tensors.end());
  group.dst_tensors.assign(pairs.dst_tensors.begin(), pairs.dst_tensors.end());
  group.slices.assign(pairs.slices.begin(), pairs.slices.end());
  for (std::size_t i = 0; i < pairs.src_blocks.size(); ++i) {
    group.src_offsets.push_back(src[i]);
    group.dst_offsets.push_back(dst[i]);
  }
  return group;
}

void check_addresses(std::span<const std::uint64_t> tensors, std::uint64_t end, const char* what) {
  const std::uint64_t highest = *std::max_element(tensors.begin(), tensors.end());
  require(end <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()),
          "a tensor of more than 2^63 - 1 bytes");
  add_checked(highest, end, what);
}

}  // namespace

void CopyPlan::add(const BlockPairs& pairs) {
  check_lengths(pairs);
  const SliceExtent extent = check_slices(pairs.slices);
  const BlockOffsets src(pairs.src_blocks, pairs.src_shifts, pairs.src_block_stride);
  const BlockOffsets dst(pairs.dst_blocks, pairs.dst_shifts, pairs.dst_block_stride);
  const std::uint64_t src_end = add_checked(src.check("source blocks"), extent.src_end, "source blocks");
  const std::uint64_t dst_end = add_checked(dst.check("destination blocks"), extent.dst_end, "destination blocks");
  if (pairs.src_tensors.empty() || pairs.src_blocks.empty() || pairs.slices.empty()) return;
  check_addresses(pairs.src_tensors, src_end, "source addresses");
  check_addresses(pairs.dst_tensors, dst_end, "destination addresses");
  const std::uint64_t block_bytes = multiply_checked(extent.bytes, pairs.src_tensors.size(), "bytes of a block");
  const std::uint64_t bytes = multiply_checked(block_bytes, pairs.src_blocks.size(), "bytes of all blocks");
  const std::uint64_t total = add_checked(num_bytes_, bytes, "bytes of the plan");

  Part part = make_part(pairs, src, dst);
  std::uint64_t pieces = 0;
  for (const Run& run : part.runs) pieces += run.num_pieces();
  if (checksums_ == Checksums::kPerPair) checked_groups_.push_back(make_checked_group(pairs, src, dst));
  num_pieces_ += pieces * part.src_tensors.size();
  parts_.push_back(std::move(part));
  num_bytes_ = total;
  num_pairs_ += pairs.src_blocks.size();
}

std::uint64_t CopyPlan::num_runs() const {
  std::uint64_t runs = 0;
  for (const Part& part : parts_) runs += part.runs.size();
  return runs;
}

std::vector<std::uint64_t> staging_tensors(std::uint64_t base, std::size_t num_tensors, std::size_t num_blocks,
                                           std::uint64_t block_bytes) {
  const std::uint64_t distance = multiply_checked(num_blocks, block_bytes, "staging tensor");
  add_checked(base, multiply_checked(num_tensors, distance, "staging buffer"), "staging buffer");
  std::vector<std::uint64_t> tensors(num_tensors);
  for (std::size_t i = 0; i < num_tensors; ++i) tensors[i] = base + i * distance;
  return tensors;
}

}  // namespace pd
