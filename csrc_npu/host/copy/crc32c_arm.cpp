// SPDX-License-Identifier: Apache-2.0
// CRC32C by the optional instruction of 64-bit ARM.
#include "crc32c_shift.h"
#include "kernels.h"

#if defined(__aarch64__)
#include <sys/auxv.h>

#include <cstring>

#define PD_TARGET

namespace pd {
namespace {

inline std::uint64_t step8(std::uint64_t crc, const std::byte* data) {
  std::uint64_t word = 0;
  __builtin_memcpy(&word, data, sizeof word);
  auto state = static_cast<std::uint32_t>(crc);
  asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(state) : "r"(word));
  return state;
}
inline std::uint32_t step1(std::uint32_t crc, std::byte value) {
  asm(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(static_cast<std::uint32_t>(value)));
  return crc;
}

}  // namespace
#include "crc32c_lanes.h"

Crc32c find_crc32c_arm() {
  constexpr unsigned long kHwcapCrc32 = 1ul << 7;
  return (getauxval(AT_HWCAP) & kHwcapCrc32) != 0 ? &crc32c_lanes : nullptr;
}

}  // namespace pd
#else
namespace pd {
Crc32c find_crc32c_arm() { return nullptr; }
}  // namespace pd
#endif
