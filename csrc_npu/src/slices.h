// SPDX-License-Identifier: Apache-2.0
// What add() does to a block's slices before it looks at the blocks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pd/copy_plan.h"

namespace pd {

// Where the bytes of one block end, on either side. Throws std::invalid_argument for empty slices, slices that begin
// before their block, or sizes that overflow.
struct SliceExtent {
  std::uint64_t src_end = 0;
  std::uint64_t dst_end = 0;
  std::uint64_t bytes = 0;  // of all slices
};
SliceExtent check_slices(std::span<const BlockSlice> slices);

// The same bytes in fewer, longer slices.
std::vector<BlockSlice> merge_slices(std::span<const BlockSlice> slices);

}  // namespace pd
