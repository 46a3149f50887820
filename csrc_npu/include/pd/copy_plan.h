// SPDX-License-Identifier: Apache-2.0
// Copy plans: which bytes go from where to where, for all layers of all cache groups at once.
//
// Pure: raw addresses and strides, no platform, no torch, nothing is dereferenced. A plan's size grows with the
// runs of consecutive blocks, not with blocks x layers: a part is a table of tensors times a list of runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace pd {

// A piece repeated over two dimensions. Offsets are bytes from the base of a source and a destination tensor.
struct Run {
  std::uint64_t src_offset = 0;
  std::uint64_t dst_offset = 0;
  std::uint64_t bytes = 0;  // of one contiguous piece, > 0
  std::uint64_t inner_count = 1;
  std::int64_t inner_src_stride = 0;
  std::int64_t inner_dst_stride = 0;
  std::uint64_t outer_count = 1;
  std::int64_t outer_src_stride = 0;
  std::int64_t outer_dst_stride = 0;

  std::uint64_t num_pieces() const { return inner_count * outer_count; }
};

// The same runs for each pair of tensors (layer-major; K and V are tensors of their own).
struct Part {
  std::vector<std::uint64_t> src_tensors;  // base addresses
  std::vector<std::uint64_t> dst_tensors;
  std::vector<Run> runs;
  std::vector<std::uint64_t> run_ends;  // bytes of one tensor up to and with run i

  std::uint64_t tensor_bytes() const { return run_ends.empty() ? 0 : run_ends.back(); }
};

// What of a block is moved: `bytes` at an offset, repeated over a strided dimension (tokens or heads).
// A whole block is {0, 0, block_bytes}. No piece may begin before its block.
struct BlockSlice {
  std::uint64_t src_offset = 0;
  std::uint64_t dst_offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t inner_count = 1;
  std::int64_t inner_src_stride = 0;
  std::int64_t inner_dst_stride = 0;
};

// Block pairs of one cache group. Block i of a tensor lies at `block * stride` (+ `shift[i]`, where shifts are given).
//
// Blocks of unlike sizes: the smaller size (or the greatest common divisor) is the unit that is moved. Where a unit
// of a larger block is contiguous, the larger side's ids are unit ids (block * ratio + k) and its stride the unit's.
// Where it is not (heads before tokens), ids and strides stay those of whole blocks, `shifts` hold the unit's place in
// its block, and a slice repeats the unit's bytes over the heads.
struct BlockPairs {
  std::span<const std::uint64_t> src_tensors;
  std::span<const std::uint64_t> dst_tensors;  // as many
  std::uint64_t src_block_stride = 0;          // bytes between two blocks of a tensor
  std::uint64_t dst_block_stride = 0;
  std::span<const std::int64_t> src_blocks;
  std::span<const std::int64_t> dst_blocks;  // as many
  std::span<const BlockSlice> slices;
  std::span<const std::int64_t> src_shifts = {};  // bytes, as many as blocks, or none
  std::span<const std::int64_t> dst_shifts = {};
};

enum class Checksums : int { kNone = 0, kPerPair = 1 };

// The pairs of one add() as they were given, for plans with checksums.
struct CheckedGroup {
  std::vector<std::uint64_t> src_tensors;
  std::vector<std::uint64_t> dst_tensors;
  std::vector<std::uint64_t> src_offsets;  // of the blocks, from a tensor's base
  std::vector<std::uint64_t> dst_offsets;
  std::vector<BlockSlice> slices;
};

class CopyPlan {
 public:
  // With kPerPair the plan also keeps every pair (so it grows with the blocks), and a copy yields one CRC32C for each,
  // in the order in which pairs were added. A pair's checksum does not depend on where its bytes lie or how they are
  // merged, only on the bytes and on the order of tensors and slices, so that both sides of a wire can compare it:
  // it is the CRC32C of the tensors' CRC32Cs (4 bytes each, little-endian, in table order); a tensor's is over its
  // slices in their order, each slice's pieces ascending.
  explicit CopyPlan(Checksums checksums = Checksums::kNone) : checksums_(checksums) {}

  // Adds the pairs of one group with adjacent pieces merged: across blocks (ids consecutive on both sides, ascending
  // or descending, or evenly spaced), across slices, and across tensors where both sides lie one after the other.
  // Throws std::invalid_argument for unequal lengths, negative block ids, zero sizes, or addresses that overflow; the
  // plan is then as it was.
  void add(const BlockPairs& pairs);

  const std::vector<Part>& parts() const { return parts_; }
  const std::vector<CheckedGroup>& checked_groups() const { return checked_groups_; }
  Checksums checksums() const { return checksums_; }
  std::uint64_t num_bytes() const { return num_bytes_; }
  std::uint64_t num_pieces() const { return num_pieces_; }  // contiguous pieces after merging
  std::uint64_t num_pairs() const { return num_pairs_; }    // block pairs added = checksums of a checked plan
  std::uint64_t num_runs() const;                           // records that the plan holds

 private:
  Checksums checksums_;
  std::vector<Part> parts_;
  std::vector<CheckedGroup> checked_groups_;
  std::uint64_t num_bytes_ = 0;
  std::uint64_t num_pieces_ = 0;
  std::uint64_t num_pairs_ = 0;
};

// Where tensors of a contiguous staging buffer begin: tensor by tensor, in each its blocks one after the other.
// With them as one side's tensors, block ids 0, 1, 2 ... and a stride of `block_bytes`, add() makes an extract (blocks
// to staging) or an inject (staging to blocks).
std::vector<std::uint64_t> staging_tensors(std::uint64_t base, std::size_t num_tensors, std::size_t num_blocks,
                                           std::uint64_t block_bytes);

}  // namespace pd
