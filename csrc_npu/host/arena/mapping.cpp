// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>

#include <cerrno>
#include <limits>
#include <string>
#include <system_error>

#include "pd/arena.h"

namespace pd {
namespace {

std::uint64_t round_up(std::uint64_t bytes) {
  return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

void* map(void* place, std::uint64_t bytes, int protection, int flags, int fd) {
  void* mapped = mmap(place, bytes, protection, flags, fd, 0);
  if (mapped == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "cannot map " + std::to_string(bytes) + " bytes");
  }
  return mapped;
}

void unmap(std::uint64_t from, std::uint64_t to) {
  if (to > from) munmap(reinterpret_cast<void*>(from), to - from);
}

}  // namespace

// mmap knows no alignment: an anonymous range that is one alignment too long is reserved, the file mapped over its
// aligned part, and the ends given back.
SharedMapping::SharedMapping(int fd, std::uint64_t num_bytes, bool writable) : num_bytes_(round_up(num_bytes)) {
  if (num_bytes == 0 || num_bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    throw std::system_error(EINVAL, std::generic_category(), "cannot map " + std::to_string(num_bytes) + " bytes");
  }
  const std::uint64_t reserved = num_bytes_ + kArenaAlignment;
  void* base = map(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  const auto start = reinterpret_cast<std::uint64_t>(base);
  address_ = round_up(start);
  try {
    const int protection = PROT_READ | (writable ? PROT_WRITE : 0);
    map(reinterpret_cast<void*>(address_), num_bytes_, protection, MAP_SHARED | MAP_FIXED, fd);
  } catch (...) {
    munmap(base, reserved);
    throw;
  }
  unmap(start, address_);
  unmap(address_ + num_bytes_, start + reserved);
}

SharedMapping::~SharedMapping() { munmap(reinterpret_cast<void*>(address_), num_bytes_); }

}  // namespace pd
