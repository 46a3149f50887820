// SPDX-License-Identifier: Apache-2.0
// Fills pools with a pattern whose every byte depends on its place, and compares.
#include <cstddef>
#include <cstring>
#include <vector>

#include "bench_api.h"
#include "kernels.h"

namespace pd::bench {
namespace {

constexpr unsigned char kPoison = 0xA5;

// splitmix64 of the word's index: neighbouring words share no bytes in practice.
std::uint64_t word_at(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t value = seed + (index + 1) * 0x9E3779B97F4A7C15ULL;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

// Of two words that differ: the first byte that does.
std::uint64_t first_difference(const std::uint64_t& left, const std::uint64_t& right) {
  unsigned char a[sizeof left];
  unsigned char b[sizeof right];
  std::memcpy(a, &left, sizeof left);
  std::memcpy(b, &right, sizeof right);
  std::uint64_t index = 0;
  while (index + 1 < sizeof left && a[index] == b[index]) ++index;
  return index;
}

}  // namespace
}  // namespace pd::bench

using namespace pd::bench;

void pd_bench_fill(std::uint64_t address, std::uint64_t bytes, std::uint64_t seed) {
  auto* words = reinterpret_cast<std::uint64_t*>(address);
  for (std::uint64_t index = 0; index < bytes / 8; ++index) words[index] = word_at(seed, index);
}

std::int64_t pd_bench_check(std::uint64_t count, std::uint64_t bytes, const std::uint64_t* addresses,
                            const std::uint64_t* offsets, std::uint64_t seed) {
  for (std::uint64_t piece = 0; piece < count; ++piece) {
    const auto* words = reinterpret_cast<const std::uint64_t*>(addresses[piece]);
    const std::uint64_t first = offsets[piece] / 8;
    for (std::uint64_t index = 0; index < bytes / 8; ++index) {
      const std::uint64_t wanted = word_at(seed, first + index);
      if (words[index] != wanted) {
        return static_cast<std::int64_t>(piece * bytes + 8 * index + first_difference(words[index], wanted));
      }
    }
  }
  return -1;
}

void pd_bench_poison(std::uint64_t count, std::uint64_t bytes, const std::uint64_t* addresses) {
  const Kernel& kernel = kernels().back();  // the widest non-temporal one, where there is one
  constexpr std::size_t kChunk = 4096;
  const std::vector<unsigned char> source(kChunk, kPoison);
  for (std::uint64_t piece = 0; piece < count; ++piece) {
    auto* to = reinterpret_cast<unsigned char*>(addresses[piece]);
    for (std::uint64_t offset = 0; offset < bytes; offset += kChunk) {
      const std::size_t size = bytes - offset < kChunk ? bytes - offset : kChunk;
      kernel.copy(to + offset, source.data(), size, nullptr);
    }
  }
  kernel.finish();
}

std::int64_t pd_bench_check_poison(std::uint64_t address, std::uint64_t bytes) {
  const auto* found = reinterpret_cast<const unsigned char*>(address);
  std::uint64_t wanted = 0;
  std::memset(&wanted, kPoison, sizeof wanted);
  for (std::uint64_t offset = 0; offset < bytes; offset += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, found + offset, sizeof word);
    if (word != wanted) return static_cast<std::int64_t>(offset + first_difference(word, wanted));
  }
  return -1;
}
