// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "pd/copy_engine.h"
#include "pd/crc32c.h"

namespace pd {
namespace {

// Best first.
constexpr const Kernel* kKernels[] = {&kAvx512Kernel, &kAvx2Kernel, &kNeonKernel, &kPortableKernel};

const Kernel& choose_kernel() {
  const char* forced = std::getenv("PD_COPY_KERNEL");
  const std::string wanted = forced == nullptr ? "" : forced;
  std::string here;
  for (const Kernel* candidate : kKernels) {
    if (candidate->name == nullptr || !candidate->is_supported()) continue;
    if (wanted.empty() || wanted == candidate->name) return *candidate;
    here += std::string(here.empty() ? "" : ", ") + candidate->name;
  }
  throw std::invalid_argument("PD_COPY_KERNEL: \"" + wanted + "\", but this machine has " + here);
}

std::uint64_t read_non_temporal_bytes() {
  const char* text = std::getenv("PD_COPY_NONTEMPORAL_BYTES");
  if (text == nullptr || *text == '\0') return kNonTemporalBytes;
  char* end = nullptr;
  const unsigned long long value = std::strtoull(text, &end, 10);
  if (*end != '\0' || *text == '-') {
    throw std::invalid_argument(std::string("PD_COPY_NONTEMPORAL_BYTES: \"") + text + "\" is not a number of bytes");
  }
  return value;
}

struct NamedCrc32c {
  const char* name;
  Crc32c function;
};

NamedCrc32c choose_crc32c() {
  if (const Crc32c found = find_crc32c_sse42()) return {"sse4.2", found};
  if (const Crc32c found = find_crc32c_arm()) return {"arm", found};
  return {"table", crc32c_table};
}

const NamedCrc32c& chosen_crc32c() {
  static const NamedCrc32c chosen = choose_crc32c();
  return chosen;
}

}  // namespace

const Kernel& kernel() {
  static const Kernel& chosen = choose_kernel();
  return chosen;
}

std::string kernel_name() { return kernel().name; }

std::uint64_t non_temporal_bytes() {
  static const std::uint64_t bytes = read_non_temporal_bytes();
  return bytes;
}

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes) {
  return chosen_crc32c().function(crc, static_cast<const std::byte*>(data), bytes);
}

std::string crc32c_name() { return chosen_crc32c().name; }

}  // namespace pd
