// SPDX-License-Identifier: Apache-2.0
// Copies with the C library only, for any CPU. There is no portable non-temporal store.
#include <cstring>

#include "kernels.h"

namespace pd {
namespace {

void copy_row(const PieceRow& row) {
  std::byte* dst = row.dst;
  const std::byte* src = row.src;
  for (std::size_t i = 0; i < row.count; ++i) {
    const std::byte* next = i + 1 < row.count ? src + row.src_stride : row.next_src;
    if (next != nullptr) __builtin_prefetch(next);
    std::memcpy(dst, src, row.bytes);
    dst += row.dst_stride;
    src += row.src_stride;
  }
}

}  // namespace

// Ordinary stores need no fence: whoever counts a chunk as done publishes them.
const Kernel kPortableKernel{"portable", [] { return true; }, copy_row, copy_row, [] {}};

}  // namespace pd
