// SPDX-License-Identifier: Apache-2.0
#include "x86_features.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>

namespace pd {
namespace {

constexpr std::uint32_t kXmmYmm = 0x06, kZmm = 0xE0;  // register files that the operating system saves

struct Leaf {
  std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf read_leaf(std::uint32_t number) {
  Leaf leaf;
  if (__get_cpuid_count(number, 0, &leaf.eax, &leaf.ebx, &leaf.ecx, &leaf.edx) == 0) return {};
  return leaf;
}

bool saves_registers(std::uint32_t mask) {
  constexpr std::uint32_t kOsxsave = 1u << 27;
  if ((read_leaf(1).ecx & kOsxsave) == 0) return false;
  std::uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & mask) == mask;
}

}  // namespace

bool has_sse42() { return (read_leaf(1).ecx & (1u << 20)) != 0; }

bool has_avx2() { return saves_registers(kXmmYmm) && (read_leaf(7).ebx & (1u << 5)) != 0; }

bool has_avx512() {
  constexpr std::uint32_t kFoundation = 1u << 16, kBytesWords = 1u << 30, kVectorLengths = 1u << 31;
  constexpr std::uint32_t kAll = kFoundation | kBytesWords | kVectorLengths;
  return saves_registers(kXmmYmm | kZmm) && (read_leaf(7).ebx & kAll) == kAll;
}

}  // namespace pd
#endif
