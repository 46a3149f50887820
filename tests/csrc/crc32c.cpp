// SPDX-License-Identifier: Apache-2.0
// Known values, and every implementation against the bitwise definition.
#include "pd/crc32c.h"

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "host/copy/kernels.h"
#include "testing.h"

namespace {

std::uint32_t by_definition(std::uint32_t crc, const std::byte* data, std::size_t bytes) {
  crc = ~crc;
  for (std::size_t i = 0; i < bytes; ++i) {
    crc ^= std::to_integer<std::uint32_t>(data[i]);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
  }
  return ~crc;
}

std::vector<std::byte> random_bytes(std::size_t count) {
  std::mt19937 random(7);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::vector<pd::Crc32c> implementations() {
  std::vector<pd::Crc32c> found{pd::crc32c_table};
  if (pd::find_crc32c_sse42() != nullptr) found.push_back(pd::find_crc32c_sse42());
  if (pd::find_crc32c_arm() != nullptr) found.push_back(pd::find_crc32c_arm());
  return found;
}

}  // namespace

TEST(known_values) {
  CHECK_EQUAL(pd::crc32c(0, "123456789", 9), 0xE3069283u);
  const std::vector<unsigned char> zeros(32, 0), ones(32, 0xFF);  // RFC 3720, B.4
  CHECK_EQUAL(pd::crc32c(0, zeros.data(), 32), 0x8A9136AAu);
  CHECK_EQUAL(pd::crc32c(0, ones.data(), 32), 0x62A8AB43u);
  CHECK_EQUAL(pd::crc32c(0, nullptr, 0), 0u);
}

TEST(every_implementation_agrees_with_the_definition) {
  const std::vector<std::byte> bytes = random_bytes(8192);
  for (const pd::Crc32c crc : implementations()) {
    for (std::size_t length = 0; length < 200; ++length) {
      for (std::size_t start = 0; start < 9; ++start) {
        CHECK_EQUAL(crc(5, &bytes[start], length), by_definition(5, &bytes[start], length));
      }
    }
    for (const std::size_t length : {1535u, 1536u, 1537u, 3071u, 3072u, 4095u, 4096u, 8191u, 8192u}) {
      CHECK_EQUAL(crc(0, bytes.data(), length), by_definition(0, bytes.data(), length));
    }
  }
}

TEST(goes_on_from_where_it_stopped) {
  const std::vector<std::byte> bytes = random_bytes(5000);
  const std::uint32_t whole = pd::crc32c(0, bytes.data(), bytes.size());
  for (const std::size_t cut : {0u, 1u, 7u, 1536u, 4999u, 5000u}) {
    const std::uint32_t first = pd::crc32c(0, bytes.data(), cut);
    CHECK_EQUAL(pd::crc32c(first, bytes.data() + cut, bytes.size() - cut), whole);
  }
}
