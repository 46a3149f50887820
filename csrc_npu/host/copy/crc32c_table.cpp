// SPDX-License-Identifier: Apache-2.0
// CRC32C without CPU support: eight table look-ups for eight bytes.
#include <array>
#include <cstring>

#include "kernels.h"

namespace pd {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // reversed
using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t i = 1; i < 8; ++i) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[i - 1][byte];
      tables[i][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

std::uint32_t crc32c_table(std::uint32_t crc, const std::byte* data, std::size_t bytes) {
  crc = ~crc;
  for (; bytes >= 8; bytes -= 8, data += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, sizeof word);
    word ^= crc;
    crc = 0;
    for (std::size_t i = 0; i < 8; ++i) crc ^= kTables[7 - i][(word >> (8 * i)) & 0xFF];
  }
  for (; bytes > 0; --bytes, ++data)
    crc = (crc >> 8) ^ kTables[0][(crc ^ std::to_integer<std::uint32_t>(*data)) & 0xFF];
  return ~crc;
}

}  // namespace pd
