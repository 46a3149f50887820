// SPDX-License-Identifier: Apache-2.0
// Copies with 32-byte vectors of x86.
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "x86_features.h"

#define PD_TARGET __attribute__((target("avx2")))

namespace pd {
namespace {

struct Vec {
  static constexpr std::size_t kBytes = 32;
  using type = __m256i;
  PD_TARGET static type load(const std::byte* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  PD_TARGET static void store(std::byte* to, type value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value); }
  PD_TARGET static void stream(std::byte* to, type value) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), value);
  }
  PD_TARGET static void prefetch(const std::byte* from) { _mm_prefetch(from, _MM_HINT_T0); }
};

}  // namespace
#include "vector_copy.h"

const Kernel kAvx2Kernel{"avx2", has_avx2, copy_row_temporal, copy_row_streaming, [] { _mm_sfence(); }};

}  // namespace pd
#else
namespace pd {
const Kernel kAvx2Kernel{};
}
#endif
