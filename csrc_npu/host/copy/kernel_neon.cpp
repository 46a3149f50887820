// SPDX-License-Identifier: Apache-2.0
// Copies with pairs of 16-byte vectors of 64-bit ARM; every such CPU has them.
#include "kernels.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstring>

#define PD_TARGET

namespace pd {
namespace {

struct Vec {
  static constexpr std::size_t kBytes = 32;
  struct Halves {
    uint8x16_t low, high;
  };
  using type = Halves;
  static type load(const std::byte* from) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(from);
    return {vld1q_u8(bytes), vld1q_u8(bytes + 16)};
  }
  static void store(std::byte* to, type value) {
    auto* bytes = reinterpret_cast<std::uint8_t*>(to);
    vst1q_u8(bytes, value.low);
    vst1q_u8(bytes + 16, value.high);
  }
  static void stream(std::byte* to, type value) {  // there is no intrinsic for it
    asm volatile("stnp %q0, %q1, [%2]" : : "w"(value.low), "w"(value.high), "r"(to) : "memory");
  }
  static void prefetch(const std::byte* from) { __builtin_prefetch(from); }
};

}  // namespace
#include "vector_copy.h"

const Kernel kNeonKernel{"neon", [] { return true; }, copy_row_temporal, copy_row_streaming,
                         [] {
                           asm volatile("dmb ish" : : : "memory");
                         }};

}  // namespace pd
#else
namespace pd {
const Kernel kNeonKernel{};
}
#endif
