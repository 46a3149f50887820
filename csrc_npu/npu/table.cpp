// SPDX-License-Identifier: Apache-2.0
#include "table.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace pd::npu {
namespace {

constexpr std::uint64_t kWord = 4;

std::uint64_t packed_size(const CacheTensor& tensor) {
  std::uint64_t bytes = 0;
  for (const Slice& slice : tensor.slices) bytes += slice.bytes * slice.count;
  return bytes;
}

void check_tensor(const CacheTensor& tensor, std::size_t index) {
  const std::string name = "tensor " + std::to_string(index);
  if (tensor.address == 0 || tensor.block_stride == 0 || tensor.num_blocks == 0) {
    throw std::invalid_argument(name + ": address, block stride and number of blocks must not be zero");
  }
  if (tensor.slices.empty()) throw std::invalid_argument(name + ": no slices");
  for (const Slice& slice : tensor.slices) {
    if (slice.bytes == 0 || slice.count == 0) throw std::invalid_argument(name + ": an empty slice");
    if (slice.count > 1 && slice.stride < slice.bytes) throw std::invalid_argument(name + ": pieces overlap");
    const std::uint64_t room = tensor.block_stride;
    const bool fits = slice.offset <= room && slice.bytes <= room && slice.stride <= room && slice.count <= room &&
                      slice.offset + (slice.count - 1) * slice.stride + slice.bytes <= room;
    if (!fits) throw std::invalid_argument(name + ": a slice leaves its block of " + std::to_string(room) + " bytes");
  }
}

bool is_words(const CacheTensor& tensor) {
  const auto odd = [](const Slice& s) { return (s.offset | s.bytes | (s.count > 1 ? s.stride : 0)) % kWord != 0; };
  return (tensor.address | tensor.block_stride) % kWord == 0 && std::ranges::none_of(tensor.slices, odd);
}

bool are_equal(const Slice& a, const Slice& b) {
  return a.offset == b.offset && a.bytes == b.bytes && a.count == b.count && a.stride == b.stride;
}

// Tensors that can be one group of a copy plan.
bool are_alike(const CacheTensor& a, const CacheTensor& b) {
  return a.block_stride == b.block_stride && std::ranges::equal(a.slices, b.slices, are_equal);
}

std::vector<BlockSlice> to_block_slices(const std::vector<Slice>& slices, Direction direction) {
  std::vector<BlockSlice> made;
  std::uint64_t packed = 0;
  for (const Slice& slice : slices) {
    BlockSlice block{slice.offset, packed, slice.bytes, slice.count};
    block.inner_src_stride = static_cast<std::int64_t>(slice.stride);
    block.inner_dst_stride = static_cast<std::int64_t>(slice.bytes);
    if (direction == Direction::kInject) {
      std::swap(block.src_offset, block.dst_offset);
      std::swap(block.inner_src_stride, block.inner_dst_stride);
    }
    made.push_back(block);
    packed += slice.bytes * slice.count;
  }
  return made;
}

}  // namespace

Table::Table(std::vector<CacheTensor> tensors) : tensors_(std::move(tensors)) {
  if (tensors_.empty()) throw std::invalid_argument("a table without tensors");
  num_blocks_ = std::numeric_limits<std::uint64_t>::max();
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    check_tensor(tensors_[i], i);
    packed_bytes_.push_back(packed_size(tensors_[i]));
    packed_block_bytes_ += packed_bytes_.back();
    num_blocks_ = std::min(num_blocks_, tensors_[i].num_blocks);
  }
  if (std::ranges::all_of(tensors_, is_words)) make_rows();
}

void Table::make_rows() {
  const auto words = [](std::uint64_t bytes) { return static_cast<std::int64_t>(bytes / kWord); };
  std::uint64_t prefix = 0;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    std::uint64_t packed = 0;
    for (const Slice& slice : tensors_[i].slices) {
      rows_.push_back({static_cast<std::int64_t>(tensors_[i].address + slice.offset), words(tensors_[i].block_stride),
                       words(prefix), words(packed_bytes_[i]), words(packed), words(slice.bytes),
                       static_cast<std::int64_t>(slice.count), words(slice.count > 1 ? slice.stride : 0)});
      packed += slice.bytes * slice.count;
    }
    prefix += packed_bytes_[i];
  }
}

bool Table::has_short_pieces() const {
  return std::ranges::all_of(rows_, [](const Row& row) { return row[6] > 1 && row[5] <= kShortPieceWords; });
}

void Table::check(std::span<const std::int64_t> block_ids, std::uint64_t staging_bytes) const {
  for (const std::int64_t id : block_ids) {
    if (id < 0 || static_cast<std::uint64_t>(id) >= num_blocks_) {
      throw std::invalid_argument("block id " + std::to_string(id) + " where the smallest tensor has " +
                                  std::to_string(num_blocks_) + " blocks");
    }
  }
  const std::uint64_t wanted = packed_block_bytes_ * block_ids.size();
  if (staging_bytes < wanted) {
    throw std::invalid_argument("staging has " + std::to_string(staging_bytes) + " bytes, " +
                                std::to_string(block_ids.size()) + " blocks need " + std::to_string(wanted));
  }
}

CopyPlan Table::plan_copies(Direction direction, std::span<const std::int64_t> block_ids, std::uint64_t staging) const {
  CopyPlan plan;
  std::vector<std::int64_t> packed_ids(block_ids.size());
  for (std::size_t i = 0; i < packed_ids.size(); ++i) packed_ids[i] = static_cast<std::int64_t>(i);
  const bool extract = direction == Direction::kExtract;
  std::uint64_t packed_address = staging;
  for (std::size_t first = 0, end = 0; first < tensors_.size(); first = end) {
    std::vector<std::uint64_t> cache, packed;
    while (end < tensors_.size() && are_alike(tensors_[first], tensors_[end])) {
      cache.push_back(tensors_[end].address);
      packed.push_back(packed_address);
      packed_address += packed_bytes_[end++] * block_ids.size();
    }
    const auto slices = to_block_slices(tensors_[first].slices, direction);
    BlockPairs pairs;
    pairs.src_tensors = extract ? cache : packed;
    pairs.dst_tensors = extract ? packed : cache;
    pairs.src_block_stride = extract ? tensors_[first].block_stride : packed_bytes_[first];
    pairs.dst_block_stride = extract ? packed_bytes_[first] : tensors_[first].block_stride;
    pairs.src_blocks = extract ? block_ids : packed_ids;
    pairs.dst_blocks = extract ? packed_ids : block_ids;
    pairs.slices = slices;
    plan.add(pairs);
  }
  return plan;
}

}  // namespace pd::npu
