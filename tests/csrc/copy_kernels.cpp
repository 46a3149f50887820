// SPDX-License-Identifier: Apache-2.0
// Every kernel that this CPU has: all short lengths at all places in a line, long ones, rows, and what must not change.
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "host/copy/kernels.h"
#include "testing.h"

namespace {

constexpr std::size_t kGuard = 256;

struct Variant {
  std::string name;
  void (*copy_row)(const pd::PieceRow& row);
  void (*fence)();
};

std::vector<Variant> variants() {
  std::vector<Variant> found;
  for (const pd::Kernel* kernel : {&pd::kPortableKernel, &pd::kAvx2Kernel, &pd::kAvx512Kernel, &pd::kNeonKernel}) {
    if (kernel->name == nullptr || !kernel->is_supported()) continue;
    found.push_back({std::string(kernel->name) + " temporal", kernel->copy_temporal, kernel->fence});
    found.push_back({std::string(kernel->name) + " streaming", kernel->copy_streaming, kernel->fence});
  }
  return found;
}

std::vector<std::byte> random_bytes(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// Copies a row between buffers and compares all of the destination with a bytewise copy.
void check_row(const Variant& variant, const std::vector<std::byte>& src, std::vector<std::byte>& dst,
               const pd::PieceRow& row) {
  std::vector<std::byte> wanted = dst;
  const std::ptrdiff_t from = row.src - src.data(), to = row.dst - dst.data();
  for (std::size_t i = 0; i < row.count; ++i) {
    const auto step = static_cast<std::ptrdiff_t>(i);
    for (std::size_t byte = 0; byte < row.bytes; ++byte) {
      const auto at = static_cast<std::ptrdiff_t>(byte);
      wanted[static_cast<std::size_t>(to + step * row.dst_stride + at)] =
          src[static_cast<std::size_t>(from + step * row.src_stride + at)];
    }
  }
  variant.copy_row(row);
  variant.fence();
  if (dst != wanted) {
    pd::testing::fail(__FILE__, __LINE__,
                      variant.name + ": " + std::to_string(row.bytes) + " bytes x " + std::to_string(row.count) +
                          " from +" + std::to_string(from) + " to +" + std::to_string(to));
  }
}

}  // namespace

TEST(short_pieces_at_all_places) {
  const std::vector<std::byte> src = random_bytes(2048, 1);
  std::vector<std::byte> dst = random_bytes(2048, 2);
  for (const Variant& variant : variants()) {
    for (std::size_t bytes = 1; bytes < 300; ++bytes) {
      for (const std::size_t to : {0u, 1u, 8u, 31u, 32u, 63u}) {
        for (const std::size_t from : {0u, 5u, 32u}) {
          check_row(variant, src, dst, {&dst[kGuard + to], &src[kGuard + from], bytes});
        }
      }
    }
  }
}

TEST(long_pieces_over_all_borders) {
  const std::vector<std::byte> src = random_bytes(100000, 3);
  std::vector<std::byte> dst = random_bytes(100000, 4);
  for (const Variant& variant : variants()) {
    for (const std::size_t bytes :
         {511u, 512u, 513u, 575u, 576u, 4095u, 4096u, 4097u, 8192u, 8255u, 32767u, 32768u, 32769u, 65536u, 70001u}) {
      for (const std::size_t to : {0u, 1u, 48u, 63u}) {
        for (const std::size_t from : {0u, 3u, 64u}) {
          pd::PieceRow row{&dst[kGuard + to], &src[kGuard + from], bytes};
          row.next_src = src.data();
          check_row(variant, src, dst, row);
        }
      }
    }
  }
}

TEST(rows_go_in_both_directions) {
  const std::vector<std::byte> src = random_bytes(60000, 5);
  std::vector<std::byte> dst = random_bytes(60000, 6);
  for (const Variant& variant : variants()) {
    for (const std::size_t bytes : {1u, 24u, 64u, 128u, 200u, 640u}) {
      check_row(variant, src, dst, {&dst[kGuard], &src[kGuard], bytes, 40, 640, 1280});
      check_row(variant, src, dst, {&dst[kGuard + 27300], &src[kGuard], bytes, 40, -700, 640});
      check_row(variant, src, dst, {&dst[kGuard], &src[kGuard + 30000], bytes, 40, 700, 0});
    }
  }
}
