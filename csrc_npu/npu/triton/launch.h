// SPDX-License-Identifier: Apache-2.0
// Launching a kernel that was lowered to HIVM and rewritten for this machine. C ABI; all calls are synchronous.
//
// A library with such kernels exports for each of them
//   void NAME(void* args, uint64_t args_bytes, uint32_t grid)             runs the grid; aborts on a fault (see
//   SimStats) int32_t NAME_sim(args, args_bytes, grid, const SimOptions*, SimStats*)  runs it and tells; 0, or -1 for
//   bad arguments
// `args` is packed as triton-ascend's launcher packs it: `LaunchArgs`.
#ifndef PD_NPU_TRITON_LAUNCH_H_
#define PD_NPU_TRITON_LAUNCH_H_

#include <cstdint>

namespace pd::npu_sim {

struct LaunchArgs {
  std::uint64_t ffts_base;        // hardware's own, unused here
  std::uint64_t sync_block_lock;  // likewise
  std::uint64_t workspace;        // likewise
  std::uint64_t rows;
  std::uint64_t block_ids;
  std::uint64_t staging;
  std::int32_t num_rows;
  std::int32_t num_blocks;
  std::int32_t grid_x;
  std::int32_t grid_y;
  std::int32_t grid_z;
};
constexpr std::uint64_t kLaunchArgsBytes = 68;  // without the padding at the end

struct SimOptions {
  std::uint32_t cores = 2;      // programs that run at the same time
  std::uint32_t delay_us = 30;  // a transfer takes up to this, by chance
  std::int32_t slow_pipe = -1;  // PipeId that also takes eight times `delay_us` for each transfer; -1: none
  std::uint32_t seed = 0;
  std::uint32_t flag_timeout_ms = 5000;
};

// The last four are faults when they are not 0.
struct SimStats {
  std::int64_t loads;
  std::int64_t stores;
  std::int64_t bytes_loaded;
  std::int64_t bytes_stored;
  std::int64_t flags_left;
  std::int64_t deadlocks;   // waits whose flag never came
  std::int64_t overruns;    // accesses outside the unified buffer
  std::int64_t misaligned;  // transfers that start off a 32-byte line of the buffer
};

// A memref of rank 1 as MLIR passes it.
struct Vector {
  void* allocated;
  void* aligned;
  std::int64_t offset;
  std::int64_t size;
  std::int64_t stride;
};

using Kernel = void (*)(std::int64_t ffts, Vector* lock, Vector* workspace, Vector* rows, Vector* ids, Vector* staging,
                        std::int32_t num_rows, std::int32_t num_blocks, std::int32_t x, std::int32_t y, std::int32_t z);

// What NAME_sim and NAME call.
std::int32_t run_kernel(Kernel kernel, const void* args, std::uint64_t args_bytes, std::uint32_t grid,
                        const SimOptions& options, SimStats& stats);
void run_kernel_or_abort(const char* name, Kernel kernel, const void* args, std::uint64_t args_bytes,
                         std::uint32_t grid);

}  // namespace pd::npu_sim

// Defines both entries of a kernel.
#define PD_SIM_KERNEL(NAME)                                                                                         \
  extern "C" void _mlir_ciface_##NAME##_hivm(std::int64_t, pd::npu_sim::Vector*, pd::npu_sim::Vector*,              \
                                             pd::npu_sim::Vector*, pd::npu_sim::Vector*, pd::npu_sim::Vector*,      \
                                             std::int32_t, std::int32_t, std::int32_t, std::int32_t, std::int32_t); \
  extern "C" void NAME(void* args, std::uint64_t args_bytes, std::uint32_t grid) {                                  \
    pd::npu_sim::run_kernel_or_abort(#NAME, &_mlir_ciface_##NAME##_hivm, args, args_bytes, grid);                   \
  }                                                                                                                 \
  extern "C" std::int32_t NAME##_sim(const void* args, std::uint64_t args_bytes, std::uint32_t grid,                \
                                     const pd::npu_sim::SimOptions* options, pd::npu_sim::SimStats* stats) {        \
    return pd::npu_sim::run_kernel(&_mlir_ciface_##NAME##_hivm, args, args_bytes, grid, *options, *stats);          \
  }

#endif  // PD_NPU_TRITON_LAUNCH_H_
