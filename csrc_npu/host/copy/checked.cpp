// SPDX-License-Identifier: Apache-2.0
#include "checked.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "pd/crc32c.h"
#include "walk.h"

namespace pd {
namespace {

static_assert(std::endian::native == std::endian::little, "checksums of tensors are folded as little-endian words");

// Bytes pass through a buffer in the first-level cache: the checksum is of what is written, even while a peer
// changes the source.
constexpr std::size_t kBufferBytes = 4096;

using CopyRow = void (*)(const PieceRow& row);

struct Piece {
  std::uint64_t src;
  std::uint64_t dst;
  std::uint64_t bytes;
};

// `copy_row` is null to look at the source only.
std::uint32_t copy_piece(std::uint32_t crc, const Piece& piece, CopyRow copy_row) {
  const auto* src = reinterpret_cast<const std::byte*>(piece.src);
  if (copy_row == nullptr) return crc32c(crc, src, piece.bytes);
  auto* dst = reinterpret_cast<std::byte*>(piece.dst);
  alignas(64) std::byte buffer[kBufferBytes];
  for (std::uint64_t done = 0; done < piece.bytes; done += kBufferBytes) {
    const std::size_t bytes = std::min<std::uint64_t>(kBufferBytes, piece.bytes - done);
    PieceRow in{buffer, src + done, bytes};
    if (done + bytes < piece.bytes) in.next_src = src + done + bytes;
    kernel().copy_temporal(in);
    crc = crc32c(crc, buffer, bytes);
    copy_row({dst + done, buffer, bytes});
  }
  return crc;
}

std::uint32_t copy_pair(const CheckedGroup& group, std::size_t pair, Side side, CopyRow copy_row) {
  std::uint32_t folded = 0;
  for (std::size_t tensor = 0; tensor < group.src_tensors.size(); ++tensor) {
    const std::uint64_t src = group.src_tensors[tensor] + group.src_offsets[pair];
    const std::uint64_t dst = group.dst_tensors[tensor] + group.dst_offsets[pair];
    std::uint32_t crc = 0;
    for (const BlockSlice& slice : group.slices) {
      for (std::uint64_t i = 0; i < slice.inner_count; ++i) {
        Piece piece{src + slice.src_offset + i * static_cast<std::uint64_t>(slice.inner_src_stride),
                    dst + slice.dst_offset + i * static_cast<std::uint64_t>(slice.inner_dst_stride), slice.bytes};
        if (side == Side::kDestination) piece.src = piece.dst;
        crc = copy_piece(crc, piece, copy_row);
      }
    }
    folded = crc32c(folded, &crc, sizeof crc);
  }
  return folded;
}

struct PairPlace {
  const CheckedGroup* group = nullptr;
  std::size_t pair = 0;
};

PairPlace find_pair(const CopyPlan& plan, std::uint64_t number) {
  for (const CheckedGroup& group : plan.checked_groups()) {
    if (number < group.src_offsets.size()) return {&group, static_cast<std::size_t>(number)};
    number -= group.src_offsets.size();
  }
  return {};
}

}  // namespace

void require_places(const CopyPlan& plan, std::span<const std::uint32_t> checksums) {
  const std::uint64_t wanted = plan.checksums() == Checksums::kPerPair ? plan.num_pairs() : 0;
  if (checksums.size() != wanted) {
    throw std::invalid_argument(std::to_string(checksums.size()) + " places for the checksums of a plan with " +
                                std::to_string(wanted));
  }
}

void checksum(const CopyPlan& plan, Side side, std::span<std::uint32_t> checksums) {
  require_places(plan, checksums);
  std::size_t next = 0;
  for (const CheckedGroup& group : plan.checked_groups()) {
    for (std::size_t pair = 0; pair < group.src_offsets.size(); ++pair) {
      checksums[next++] = copy_pair(group, pair, side, nullptr);
    }
  }
}

CheckedWalk::CheckedWalk(const CopyPlan& plan, std::span<std::uint32_t> checksums)
    : plan_(plan), checksums_(checksums) {
  require_places(plan, checksums);
  if (plan.num_pairs() == 0) return;
  const std::uint64_t pair_bytes = plan.num_bytes() / plan.num_pairs();
  pairs_per_chunk_ = std::max<std::uint64_t>(1, kChunkBytes / std::max<std::uint64_t>(1, pair_bytes));
  num_chunks_ = (plan.num_pairs() + pairs_per_chunk_ - 1) / pairs_per_chunk_;
}

void CheckedWalk::copy_chunk(std::uint64_t chunk, bool streaming) const {
  const CopyRow copy_row = streaming ? kernel().copy_streaming : kernel().copy_temporal;
  const std::uint64_t first = chunk * pairs_per_chunk_;
  const std::uint64_t end = std::min(first + pairs_per_chunk_, plan_.num_pairs());
  for (std::uint64_t number = first; number < end; ++number) {
    const PairPlace place = find_pair(plan_, number);
    checksums_[number] = copy_pair(*place.group, place.pair, Side::kSource, copy_row);
  }
}

}  // namespace pd
