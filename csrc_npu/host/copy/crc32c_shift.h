// SPDX-License-Identifier: Apache-2.0
// Joins CRC32Cs of neighbouring stretches: what a CRC state becomes after a fixed number of zero bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace pd {

// The crc instruction has a latency of three steps; three lanes of this many bytes each keep it busy.
inline constexpr std::size_t kLaneBytes = 512;

// Four look-ups move a state over kLaneBytes zero bytes.
struct LaneShift {
  std::array<std::array<std::uint32_t, 256>, 4> table{};

  constexpr LaneShift() {
    std::array<std::uint32_t, 32> columns{};
    for (std::size_t bit = 0; bit < 32; ++bit) columns[bit] = advance(1u << bit);
    for (std::size_t byte = 0; byte < 4; ++byte) {
      for (std::size_t value = 0; value < 256; ++value) {
        std::uint32_t moved = 0;
        for (std::size_t bit = 0; bit < 8; ++bit) moved ^= (value >> bit & 1) != 0 ? columns[byte * 8 + bit] : 0;
        table[byte][value] = moved;
      }
    }
  }

  constexpr std::uint32_t operator()(std::uint32_t state) const {
    return table[0][state & 0xFF] ^ table[1][state >> 8 & 0xFF] ^ table[2][state >> 16 & 0xFF] ^ table[3][state >> 24];
  }

 private:
  static constexpr std::uint32_t advance(std::uint32_t state) {
    for (std::size_t i = 0; i < kLaneBytes * 8; ++i) state = (state >> 1) ^ ((state & 1) != 0 ? 0x82F63B78u : 0);
    return state;
  }
};

extern const LaneShift kLaneShift;

}  // namespace pd
