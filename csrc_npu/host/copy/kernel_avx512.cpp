// SPDX-License-Identifier: Apache-2.0
// Copies with 64-byte vectors of x86.
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "x86_features.h"

#define PD_TARGET __attribute__((target("avx512f,avx512bw,avx512vl")))

namespace pd {
namespace {

struct Vec {
  static constexpr std::size_t kBytes = 64;
  using type = __m512i;
  PD_TARGET static type load(const std::byte* from) {
    return _mm512_loadu_si512(reinterpret_cast<const __m512i*>(from));
  }
  PD_TARGET static void store(std::byte* to, type value) { _mm512_storeu_si512(reinterpret_cast<__m512i*>(to), value); }
  PD_TARGET static void stream(std::byte* to, type value) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), value);
  }
  PD_TARGET static void prefetch(const std::byte* from) { _mm_prefetch(from, _MM_HINT_T0); }
};

}  // namespace
#include "vector_copy.h"

const Kernel kAvx512Kernel{"avx512", has_avx512, copy_row_temporal, copy_row_streaming, [] { _mm_sfence(); }};

}  // namespace pd
#else
namespace pd {
const Kernel kAvx512Kernel{};
}
#endif
