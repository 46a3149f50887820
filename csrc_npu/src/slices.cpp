// SPDX-License-Identifier: Apache-2.0
#include "slices.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "pd/check.h"

namespace pd {
namespace {

constexpr std::uint64_t kMaxBytes = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

// End of a strided piece; `offset` is its first one's.
std::uint64_t end_of(std::uint64_t offset, const BlockSlice& slice, std::int64_t stride, const char* what) {
  const std::uint64_t steps = slice.inner_count - 1;
  const std::uint64_t step = stride < 0 ? ~static_cast<std::uint64_t>(stride) + 1 : static_cast<std::uint64_t>(stride);
  const std::uint64_t span = multiply_checked(steps, step, what);
  if (stride < 0) {
    require(span <= offset, "a slice begins before its block");
    return add_checked(offset, slice.bytes, what);
  }
  return add_checked(add_checked(offset, span, what), slice.bytes, what);
}

// A repetition that leaves no gaps is one longer piece.
void fold(BlockSlice& slice) {
  const auto bytes = static_cast<std::int64_t>(slice.bytes);
  if (slice.inner_count > 1 && slice.inner_src_stride == bytes && slice.inner_dst_stride == bytes) {
    slice.bytes *= slice.inner_count;
    slice.inner_count = 1;
  }
  if (slice.inner_count == 1) slice.inner_src_stride = slice.inner_dst_stride = 0;
}

bool follows(const BlockSlice& first, const BlockSlice& second) {
  return first.inner_count == second.inner_count && first.inner_src_stride == second.inner_src_stride &&
         first.inner_dst_stride == second.inner_dst_stride && second.src_offset == first.src_offset + first.bytes &&
         second.dst_offset == first.dst_offset + first.bytes;
}

// Equal single pieces at even distances are one repeated piece.
bool are_evenly_spaced(const std::vector<BlockSlice>& slices) {
  const auto src_step = slices[1].src_offset - slices[0].src_offset;  // wraps, as do the differences below
  const auto dst_step = slices[1].dst_offset - slices[0].dst_offset;
  for (std::size_t i = 0; i < slices.size(); ++i) {
    if (slices[i].inner_count != 1 || slices[i].bytes != slices[0].bytes) return false;
    if (i > 0 && (slices[i].src_offset - slices[i - 1].src_offset != src_step ||
                  slices[i].dst_offset - slices[i - 1].dst_offset != dst_step)) {
      return false;
    }
  }
  return true;
}

}  // namespace

SliceExtent check_slices(std::span<const BlockSlice> slices) {
  SliceExtent extent;
  for (const BlockSlice& slice : slices) {
    require(slice.bytes > 0 && slice.inner_count > 0, "a slice of zero bytes or zero pieces");
    require(slice.bytes <= kMaxBytes, "a slice of more than 2^63 - 1 bytes");
    extent.src_end = std::max(extent.src_end, end_of(slice.src_offset, slice, slice.inner_src_stride, "source slice"));
    extent.dst_end =
        std::max(extent.dst_end, end_of(slice.dst_offset, slice, slice.inner_dst_stride, "destination slice"));
    const std::uint64_t bytes = multiply_checked(slice.bytes, slice.inner_count, "slice bytes");
    extent.bytes = add_checked(extent.bytes, bytes, "block bytes");
  }
  require(extent.src_end <= kMaxBytes && extent.dst_end <= kMaxBytes, "a slice ends after 2^63 - 1 bytes");
  return extent;
}

std::vector<BlockSlice> merge_slices(std::span<const BlockSlice> slices) {
  std::vector<BlockSlice> merged;
  merged.reserve(slices.size());
  for (BlockSlice slice : slices) {
    fold(slice);
    if (!merged.empty() && follows(merged.back(), slice)) {
      merged.back().bytes += slice.bytes;
      fold(merged.back());
    } else {
      merged.push_back(slice);
    }
  }
  if (merged.size() > 1 && are_evenly_spaced(merged)) {
    BlockSlice& first = merged.front();
    first.inner_count = merged.size();
    first.inner_src_stride = static_cast<std::int64_t>(merged[1].src_offset - first.src_offset);
    first.inner_dst_stride = static_cast<std::int64_t>(merged[1].dst_offset - first.dst_offset);
    merged.resize(1);
  }
  return merged;
}

}  // namespace pd
