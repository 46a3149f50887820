// SPDX-License-Identifier: Apache-2.0
// CRC32C by the instruction of SSE 4.2.
#include "crc32c_shift.h"
#include "kernels.h"

#if defined(__x86_64__)
#include <nmmintrin.h>

#include <cstring>

#include "x86_features.h"

#define PD_TARGET __attribute__((target("sse4.2")))

namespace pd {
namespace {

PD_TARGET inline std::uint64_t step8(std::uint64_t crc, const std::byte* data) {
  std::uint64_t word = 0;
  __builtin_memcpy(&word, data, sizeof word);
  return _mm_crc32_u64(crc, word);
}
PD_TARGET inline std::uint32_t step1(std::uint32_t crc, std::byte value) {
  return _mm_crc32_u8(crc, static_cast<std::uint8_t>(value));
}

}  // namespace
#include "crc32c_lanes.h"

Crc32c find_crc32c_sse42() { return has_sse42() ? &crc32c_lanes : nullptr; }

}  // namespace pd
#else
namespace pd {
Crc32c find_crc32c_sse42() { return nullptr; }
}  // namespace pd
#endif
