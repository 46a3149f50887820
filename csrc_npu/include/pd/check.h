// SPDX-License-Identifier: Apache-2.0
// Argument checks and arithmetic that refuses to overflow.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pd {

// The caller broke the contract; the text names what and both values.
inline void require(bool condition, const char* text) {
  if (!condition) throw std::invalid_argument(text);
}

inline std::uint64_t add_checked(std::uint64_t a, std::uint64_t b, const char* what) {
  std::uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) {
    throw std::invalid_argument(std::string(what) + ": " + std::to_string(a) + " + " + std::to_string(b) +
                                " does not fit into 64 bits");
  }
  return sum;
}

inline std::uint64_t multiply_checked(std::uint64_t a, std::uint64_t b, const char* what) {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    throw std::invalid_argument(std::string(what) + ": " + std::to_string(a) + " * " + std::to_string(b) +
                                " does not fit into 64 bits");
  }
  return product;
}

}  // namespace pd
