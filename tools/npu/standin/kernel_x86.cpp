// SPDX-License-Identifier: Apache-2.0
// The kernels of csrc_npu/npu/kernel.h written by hand for this machine: what the stand-in launches in tests.
//
// Like the device kernel, each program strides over (row, block) tasks; here the programs run one after the other.
#include <cstdint>
#include <cstring>

#include "kernel.h"

namespace {

using pd::npu::KernelArgs;

constexpr std::int64_t kWord = 4;

template <bool kExtract>
void run_task(const KernelArgs& args, std::int64_t task) {
  const std::int64_t b = task % args.num_blocks;
  const auto* const row = reinterpret_cast<const std::int64_t*>(args.rows) + task / args.num_blocks * 8;
  const std::int64_t id = reinterpret_cast<const std::int32_t*>(args.block_ids)[b];
  auto* cache = reinterpret_cast<char*>(row[0]) + id * row[1] * kWord;
  auto* packed = reinterpret_cast<char*>(args.staging) + (row[2] * args.num_blocks + b * row[3] + row[4]) * kWord;
  for (std::int64_t i = 0; i < row[6]; ++i) {
    const auto bytes = static_cast<std::size_t>(row[5] * kWord);
    std::memcpy(kExtract ? packed : cache, kExtract ? cache : packed, bytes);
    cache += row[7] * kWord;
    packed += bytes;
  }
}

template <bool kExtract>
void run_grid(const void* packed_args, std::uint32_t grid) {
  KernelArgs args;
  std::memcpy(static_cast<void*>(&args), packed_args, offsetof(KernelArgs, grid_z) + sizeof args.grid_z);
  const std::int64_t tasks = std::int64_t{args.num_rows} * args.num_blocks;
  for (std::uint32_t program = 0; program < grid; ++program) {
    for (std::int64_t task = program; task < tasks; task += grid) run_task<kExtract>(args, task);
  }
}

}  // namespace

extern "C" {
void pd_kv_extract(void* args, std::uint64_t, std::uint32_t grid) { run_grid<true>(args, grid); }
void pd_kv_inject(void* args, std::uint64_t, std::uint32_t grid) { run_grid<false>(args, grid); }
}
