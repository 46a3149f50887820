// SPDX-License-Identifier: Apache-2.0
// What one cache group looks like to extract and inject: which bytes of a block of which tensor lie where in staging.
//
// Staging is contiguous: tensor by tensor, in each its blocks in the order of the block ids, in each its slices,
// packed. A table does not depend on a request, so its rows are uploaded once. Pure: addresses are numbers here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pd/copy_plan.h"

namespace pd::npu {

// `count` pieces of `bytes`, `stride` apart, from `offset` on in a block of the cache; packed in staging.
struct Slice {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t count = 1;
  std::uint64_t stride = 0;
};

// One tensor of a layer (K, V, nope, rope, an indexer's): its blocks are dim 0.
struct CacheTensor {
  std::uint64_t address = 0;
  std::uint64_t block_stride = 0;  // bytes between two blocks
  std::uint64_t num_blocks = 0;
  std::vector<Slice> slices;
};

// What the device kernel reads for each (tensor, slice); the ABI of csrc_npu/npu/kernel.h.
using Row = std::array<std::int64_t, 8>;

inline constexpr std::int64_t kShortPieceWords = 512;

enum class Direction : int { kExtract = 0, kInject = 1 };

class Table {
 public:
  // Throws std::invalid_argument for empty tensors, or slices that leave their block.
  explicit Table(std::vector<CacheTensor> tensors);

  std::uint64_t packed_block_bytes() const { return packed_block_bytes_; }  // staging bytes for one block id
  std::size_t num_tensors() const { return tensors_.size(); }
  // Empty where some piece is not whole 32-bit words: the kernel moves words.
  const std::vector<Row>& rows() const { return rows_; }

  // Whether blocks consist of many pieces of at most kShortPieceWords: one head of each token.
  bool has_short_pieces() const;

  // Throws std::invalid_argument when an id is not a block of every tensor, or staging is too small.
  void check(std::span<const std::int64_t> block_ids, std::uint64_t staging_bytes) const;

  // The same transfer as merged copies. Adjacent blocks, slices and tensors are one copy.
  CopyPlan plan_copies(Direction direction, std::span<const std::int64_t> block_ids, std::uint64_t staging) const;

 private:
  void make_rows();

  std::vector<CacheTensor> tensors_;
  std::vector<std::uint64_t> packed_bytes_;  // of each tensor's block
  std::vector<Row> rows_;
  std::uint64_t packed_block_bytes_ = 0;
  std::uint64_t num_blocks_ = 0;  // ids below this exist in every tensor
};

}  // namespace pd::npu
