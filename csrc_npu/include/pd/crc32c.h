// SPDX-License-Identifier: Apache-2.0
// CRC32C (Castagnoli), by the CPU's instruction where it has one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pd {

// Continues `crc` (0 to begin) over `bytes` bytes; a crc of "123456789" is 0xE3069283.
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes);

std::string crc32c_name();  // "sse4.2", "arm" or "table"

}  // namespace pd
