// SPDX-License-Identifier: Apache-2.0
#include "launch.h"

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "core.h"

namespace pd::npu_sim {

static_assert(offsetof(LaunchArgs, grid_z) + sizeof(std::int32_t) == kLaunchArgsBytes);

namespace {

Vector make_vector(std::uint64_t address) {
  auto* const start = reinterpret_cast<void*>(address);
  return {start, start, 0, std::numeric_limits<std::int64_t>::max(), 1};
}

void run_program(Kernel kernel, const LaunchArgs& args, Core& core) {
  Vector lock = make_vector(args.sync_block_lock), workspace = make_vector(args.workspace);
  Vector rows = make_vector(args.rows), ids = make_vector(args.block_ids), staging = make_vector(args.staging);
  set_core(&core);
  kernel(static_cast<std::int64_t>(args.ffts_base), &lock, &workspace, &rows, &ids, &staging, args.num_rows,
         args.num_blocks, args.grid_x, args.grid_y, args.grid_z);
  core.drain();
  set_core(nullptr);
}

}  // namespace

std::int32_t run_kernel(Kernel kernel, const void* args, std::uint64_t args_bytes, std::uint32_t grid,
                        const SimOptions& options, SimStats& stats) {
  LaunchArgs read{};
  stats = {};
  if (args_bytes < kLaunchArgsBytes || grid == 0 || options.cores == 0) return -1;
  std::memcpy(&read, args, kLaunchArgsBytes);
  if (std::int64_t{read.grid_x} * read.grid_y * read.grid_z != std::int64_t{grid}) return -1;
  std::atomic<std::uint32_t> next{0};
  std::mutex mutex;
  std::vector<std::jthread> cores;
  for (std::uint32_t i = 0; i < options.cores; ++i) {
    cores.emplace_back([&] {
      for (std::uint32_t program = next++; program < grid; program = next++) {
        Core core(options, program);
        run_program(kernel, read, core);
        const std::lock_guard lock(mutex);
        core.add_to(stats);
      }
    });
  }
  cores.clear();  // joins
  return 0;
}

void run_kernel_or_abort(const char* name, Kernel kernel, const void* args, std::uint64_t args_bytes,
                         std::uint32_t grid) {
  SimStats stats{};
  const bool ran = run_kernel(kernel, args, args_bytes, grid, SimOptions{}, stats) == 0;
  if (ran && stats.flags_left == 0 && stats.deadlocks == 0 && stats.overruns == 0 && stats.misaligned == 0) return;
  const auto print = [](std::int64_t value) { return static_cast<long long>(value); };
  std::fprintf(stderr, "%s: %s; flags left %lld, deadlocks %lld, overruns %lld, misaligned %lld\n", name,
               ran ? "fault" : "bad arguments", print(stats.flags_left), print(stats.deadlocks), print(stats.overruns),
               print(stats.misaligned));
  std::abort();
}

}  // namespace pd::npu_sim
