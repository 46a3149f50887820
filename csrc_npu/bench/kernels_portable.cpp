// SPDX-License-Identifier: Apache-2.0
// Copy kernels for any CPU: the C library's memcpy, alone and with the next piece prefetched.
#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace pd::bench {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kPrefetchBytes = 2048;  // the start of the next piece; the hardware follows from there

void copy_plain(void* destination, const void* source, std::size_t bytes, const void* /*next*/) {
  std::memcpy(destination, source, bytes);
}

void copy_prefetching(void* destination, const void* source, std::size_t bytes, const void* next) {
  if (next != nullptr) {
    const auto* ahead = static_cast<const char*>(next);
    for (std::size_t offset = 0; offset < std::min(bytes, kPrefetchBytes); offset += kLine) {
      __builtin_prefetch(ahead + offset);
    }
  }
  std::memcpy(destination, source, bytes);
}

void finish_nothing() {}

}  // namespace

void add_portable_kernels(std::vector<Kernel>& kernels) {
  kernels.push_back({"memcpy", copy_plain, finish_nothing});
  kernels.push_back({"memcpy+prefetch", copy_prefetching, finish_nothing});
}

const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> all = [] {
    std::vector<Kernel> found;
    add_portable_kernels(found);
    add_x86_kernels(found);
    return found;
  }();
  return all;
}

}  // namespace pd::bench
