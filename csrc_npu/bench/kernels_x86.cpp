// SPDX-License-Identifier: Apache-2.0
// Non-temporal copy kernels for x86-64 (AVX2, AVX-512); an empty list elsewhere.
#include "host/copy/x86_features.h"
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace pd::bench {
namespace {

constexpr std::size_t kStep = 256;             // bytes per loop
constexpr std::size_t kPrefetchBytes = 16384;  // of the next piece, while this one is copied

bool is_aligned(const void* address, std::size_t bytes) {
  return (reinterpret_cast<std::uintptr_t>(address) % 64 == 0) && bytes % kStep == 0;
}

template <bool kPrefetch>
__attribute__((target("avx2"))) void copy_avx2(void* destination, const void* source, std::size_t bytes,
                                               const void* next) {
  if (!is_aligned(destination, bytes)) {
    std::memcpy(destination, source, bytes);
    return;
  }
  auto* to = static_cast<char*>(destination);
  const auto* from = static_cast<const char*>(source);
  const auto* ahead = static_cast<const char*>(next);
  for (std::size_t offset = 0; offset < bytes; offset += kStep) {
    if (kPrefetch && ahead != nullptr && offset < kPrefetchBytes) {
      for (std::size_t line = 0; line < kStep; line += 64) _mm_prefetch(ahead + offset + line, _MM_HINT_T0);
    }
    __m256i word[8];
    for (std::size_t i = 0; i < 8; ++i)
      word[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + offset + 32 * i));
    for (std::size_t i = 0; i < 8; ++i) _mm256_stream_si256(reinterpret_cast<__m256i*>(to + offset + 32 * i), word[i]);
  }
}

template <bool kPrefetch>
__attribute__((target("avx512f"))) void copy_avx512(void* destination, const void* source, std::size_t bytes,
                                                    const void* next) {
  if (!is_aligned(destination, bytes)) {
    std::memcpy(destination, source, bytes);
    return;
  }
  auto* to = static_cast<char*>(destination);
  const auto* from = static_cast<const char*>(source);
  const auto* ahead = static_cast<const char*>(next);
  for (std::size_t offset = 0; offset < bytes; offset += kStep) {
    if (kPrefetch && ahead != nullptr && offset < kPrefetchBytes) {
      for (std::size_t line = 0; line < kStep; line += 64) _mm_prefetch(ahead + offset + line, _MM_HINT_T0);
    }
    __m512i word[4];
    for (std::size_t i = 0; i < 4; ++i) word[i] = _mm512_loadu_si512(from + offset + 64 * i);
    for (std::size_t i = 0; i < 4; ++i) _mm512_stream_si512(reinterpret_cast<__m512i*>(to + offset + 64 * i), word[i]);
  }
}

void finish_stores() { _mm_sfence(); }

}  // namespace

void add_x86_kernels(std::vector<Kernel>& kernels) {
  if (pd::has_avx2()) {
    kernels.push_back({"nt-avx2", copy_avx2<false>, finish_stores});
    kernels.push_back({"nt-avx2+prefetch", copy_avx2<true>, finish_stores});
  }
  if (pd::has_avx512()) {
    kernels.push_back({"nt-avx512", copy_avx512<false>, finish_stores});
    kernels.push_back({"nt-avx512+prefetch", copy_avx512<true>, finish_stores});
  }
}

}  // namespace pd::bench

#else

namespace pd::bench {

void add_x86_kernels(std::vector<Kernel>& /*kernels*/) {}

}  // namespace pd::bench

#endif
