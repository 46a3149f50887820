// SPDX-License-Identifier: Apache-2.0
// CRC32C in three lanes, written once over the operations of one instruction set: step8() and step1(). Included by
// crc32c_*.cpp; everything has internal linkage (see vector_copy.h).

namespace {

PD_TARGET std::uint32_t crc32c_lanes(std::uint32_t crc, const std::byte* data, std::size_t bytes) {
  std::uint64_t state = ~crc;
  for (; bytes >= 3 * kLaneBytes; bytes -= 3 * kLaneBytes, data += 3 * kLaneBytes) {
    std::uint64_t second = 0, third = 0;
    for (std::size_t i = 0; i < kLaneBytes; i += 8) {
      state = step8(state, data + i);
      second = step8(second, data + kLaneBytes + i);
      third = step8(third, data + 2 * kLaneBytes + i);
    }
    state = kLaneShift(static_cast<std::uint32_t>(state)) ^ static_cast<std::uint32_t>(second);
    state = kLaneShift(static_cast<std::uint32_t>(state)) ^ static_cast<std::uint32_t>(third);
  }
  for (; bytes >= 8; bytes -= 8, data += 8) state = step8(state, data);
  auto rest = static_cast<std::uint32_t>(state);
  for (; bytes > 0; --bytes, ++data) rest = step1(rest, *data);
  return ~rest;
}

}  // namespace
