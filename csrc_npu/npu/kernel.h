// SPDX-License-Identifier: Apache-2.0
// The device kernels, extract and inject: loaded once and launched with packed arguments.
//
// A kernel is persistent: its programs stride over (row, block) tasks. Row i of `rows` (int64 x 8): address of the
// slice in block 0, words between blocks, packed words per block of all tensors before, packed words of this tensor's
// block, where the slice begins in it, words of a piece, pieces, words between pieces in the cache.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace pd::npu {

// As the launcher of triton-ascend packs them: three addresses of its own (unused by a kernel that only moves data),
// then ours in order, then the grid.
struct KernelArgs {
  std::uint64_t cross_core_sync = 0;
  std::uint64_t block_lock = 0;
  std::uint64_t workspace = 0;
  std::uint64_t rows = 0;
  std::uint64_t block_ids = 0;  // int32
  std::uint64_t staging = 0;
  std::int32_t num_rows = 0;
  std::int32_t num_blocks = 0;
  std::int32_t grid_x = 0;
  std::int32_t grid_y = 1;
  std::int32_t grid_z = 1;
};

// The functions of the kernel. `_pieces` are for tables of many short pieces (one head of each token) and may be left
// out: their paths are then empty and the others do it.
enum class Role : int { kExtract = 0, kInject = 1, kExtractPieces = 2, kInjectPieces = 3 };
inline constexpr std::size_t kNumRoles = 4;

struct Entry {
  std::string path;  // of the binary
  std::string name;  // of the function in it
};

// Functions live as long as the process.
class Kernel {
 public:
  // `grid`: vector cores of the device. Throws std::runtime_error, naming the file or the function and the error.
  Kernel(const std::array<Entry, kNumRoles>& entries, std::uint32_t grid);

  std::uint32_t grid() const { return grid_; }
  // Puts the launch onto a stream; returns the runtime's error. `stream` is an aclrtStream.
  int launch(bool extract, bool short_pieces, KernelArgs args, void* stream) const;

 private:
  std::array<void*, kNumRoles> functions_{};
  std::uint32_t grid_;
};

}  // namespace pd::npu
