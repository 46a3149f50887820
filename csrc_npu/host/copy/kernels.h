// SPDX-License-Identifier: Apache-2.0
// The copy kernels of this CPU. A kernel copies a row: one piece, repeated at even distances.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pd {

struct PieceRow {
  std::byte* dst = nullptr;
  const std::byte* src = nullptr;
  std::size_t bytes = 0;  // of a piece
  std::size_t count = 1;
  std::ptrdiff_t dst_stride = 0;
  std::ptrdiff_t src_stride = 0;
  const std::byte* next_src = nullptr;  // of the row that comes next, to prefetch; or null
};

struct Kernel {
  const char* name;
  bool (*is_supported)();
  void (*copy_temporal)(const PieceRow& row);
  void (*copy_streaming)(const PieceRow& row);  // non-temporal stores; visible to others after fence()
  void (*fence)();
};

// One per instruction set; a null name: not built for this architecture.
extern const Kernel kPortableKernel;
extern const Kernel kAvx2Kernel;
extern const Kernel kAvx512Kernel;
extern const Kernel kNeonKernel;

// The kernel that is used, chosen at the first call. Throws std::invalid_argument when PD_COPY_KERNEL names one that
// is unknown or that this CPU has not.
const Kernel& kernel();

// Another CRC32C implementation: null when this CPU has not got it.
using Crc32c = std::uint32_t (*)(std::uint32_t crc, const std::byte* data, std::size_t bytes);
std::uint32_t crc32c_table(std::uint32_t crc, const std::byte* data, std::size_t bytes);
Crc32c find_crc32c_sse42();
Crc32c find_crc32c_arm();

}  // namespace pd
