// SPDX-License-Identifier: Apache-2.0
// C ABI of libpd_bench.so: what the benches measure *against*, and how they check bytes. It shares nothing with the
// copy engine or the data plane (`libpd_host.so`) but the look at the CPU's features, so that neither can hide the
// other's mistake.
#pragma once

#include <cstdint>

#define PD_BENCH_API extern "C" __attribute__((visibility("default")))

// ---- the copy limit: gather-scatter of pieces on a team of threads

// Comma-separated names of the copy kernels that this CPU can run; a kernel is called by its index in the list.
PD_BENCH_API const char* pd_bench_kernels();

// The caller is one of the `num_threads` (>= 1); nullptr when the threads cannot be started.
PD_BENCH_API void* pd_bench_team_create(unsigned num_threads);
PD_BENCH_API void pd_bench_team_destroy(void* team);

// Copies `count` pieces of `bytes` bytes from sources[i] to destinations[i]; seconds, or -1 for a bad kernel.
PD_BENCH_API double pd_bench_copy(void* team, int kernel, std::uint64_t count, std::uint64_t bytes,
                                  const std::uint64_t* destinations, const std::uint64_t* sources);

// ---- the pattern: word w of a pool is a hash of (seed, w), so every byte says where it belongs

PD_BENCH_API void pd_bench_fill(std::uint64_t address, std::uint64_t bytes, std::uint64_t seed);
// Piece i at addresses[i] must hold the pool's bytes from offsets[i] on. -1: all right, else the index over all pieces
// of the first wrong byte. Addresses, offsets and `bytes` are multiples of 8.
PD_BENCH_API std::int64_t pd_bench_check(std::uint64_t count, std::uint64_t bytes, const std::uint64_t* addresses,
                                         const std::uint64_t* offsets, std::uint64_t seed);
// Overwrites pieces with the poison byte without leaving them in the cache.
PD_BENCH_API void pd_bench_poison(std::uint64_t count, std::uint64_t bytes, const std::uint64_t* addresses);
// -1: the range is all poison, else the offset of the first byte that is not.
PD_BENCH_API std::int64_t pd_bench_check_poison(std::uint64_t address, std::uint64_t bytes);

// ---- one plain TCP stream; blocking sockets; `chunk` bytes per system call. 0, or an errno (-1: peer closed early).

PD_BENCH_API int pd_bench_send(int fd, std::uint64_t address, std::uint64_t bytes, std::uint64_t chunk);
PD_BENCH_API int pd_bench_receive(int fd, std::uint64_t address, std::uint64_t bytes, std::uint64_t chunk);
