// SPDX-License-Identifier: Apache-2.0
// The C ABI of libpd_host.so: opaque handles, integers and pointers only. No exception crosses it.
//
// A function that returns int returns a negative PD_ERROR_* on failure, and pd_last_error() of the same thread says
// what it was. A function that returns a handle returns null then. Handles may be used by any thread; each is freed
// exactly once, by whoever made it, when no call that uses it runs any more.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PD_API __attribute__((visibility("default")))
#define PD_ABI_VERSION 1  // changes with every incompatible change of this file

#define PD_ERROR_INVALID (-1)  // an argument; the text says which
#define PD_ERROR_MEMORY (-2)   // out of memory
#define PD_ERROR_SYSTEM (-3)   // the operating system refused; the text says what
#define PD_ERROR_INTERNAL (-4)

PD_API int pd_abi_version(void);
PD_API const char* pd_last_error(void);   // of this thread's last failed call; valid until its next call
PD_API int pd_last_errno(void);           // the system's error number with PD_ERROR_SYSTEM and PD_ERROR_MEMORY, or 0
PD_API const char* pd_kernel_name(void);  // null with PD_ERROR_INVALID's text for a wrong PD_COPY_KERNEL
PD_API const char* pd_crc32c_name(void);
PD_API uint32_t pd_crc32c(uint32_t crc, const void* data, uint64_t bytes);

// ---- copies (bind/c_api_copy.cpp) ------------------------------------------------------------------------------

// `stores` and results are the values of pd::Stores and pd::CopyState. A negative `timeout_ms` means no deadline.
typedef struct pd_plan pd_plan;
typedef struct pd_pool pd_pool;
typedef struct pd_job pd_job;

// Block pairs of one group as pd::BlockPairs describes them. `slices`: six words each, in the order of the fields of
// pd::BlockSlice. Shifts may be null. The arrays are read during the call only.
typedef struct pd_block_pairs {
  uint64_t num_tensors;
  const uint64_t* src_tensors;
  const uint64_t* dst_tensors;
  uint64_t src_block_stride;
  uint64_t dst_block_stride;
  uint64_t num_slices;
  const int64_t* slices;
  uint64_t num_blocks;
  const int64_t* src_blocks;
  const int64_t* dst_blocks;
  const int64_t* src_shifts;
  const int64_t* dst_shifts;
} pd_block_pairs;

PD_API pd_plan* pd_plan_create(int with_checksums);
PD_API int pd_plan_add(pd_plan* plan, const pd_block_pairs* pairs);  // not while the plan is being copied
PD_API void pd_plan_free(pd_plan* plan);                             // jobs keep what they need
PD_API uint64_t pd_plan_num_bytes(const pd_plan* plan);
PD_API uint64_t pd_plan_num_pieces(const pd_plan* plan);
PD_API uint64_t pd_plan_num_runs(const pd_plan* plan);
PD_API uint64_t pd_plan_num_pairs(const pd_plan* plan);

// Blocks until the copy is done or its deadline passed; returns the state. `checksums`: num_checksums places, exactly
// the plan's pairs when it has checksums, else null and 0.
PD_API int pd_execute(const pd_plan* plan, int stores, int64_t timeout_ms, uint32_t* checksums, uint64_t num_checksums);

// Checksums of the source's bytes as they are now (side 0), or of the destination's (side 1), without a copy.
PD_API int pd_checksum(const pd_plan* plan, int side, uint32_t* checksums, uint64_t num_checksums);

// Plan and execution of one group in one call: what extract, inject and straight copies of a request need.
PD_API int pd_copy_blocks(const pd_block_pairs* pairs, int stores, int64_t timeout_ms);

// The same blocks of several groups (an MLA layer's latent and rope parts) in one call, apart from what a group always
// has: the block fields of `groups` are not read.
PD_API int pd_copy_groups(const pd_block_pairs* const* groups, uint64_t num_groups, uint64_t num_blocks,
                          const int64_t* src_blocks, const int64_t* dst_blocks, int stores, int64_t timeout_ms);

PD_API pd_pool* pd_pool_create(uint32_t num_threads, const int32_t* cpus, uint64_t num_cpus);
PD_API void pd_pool_free(pd_pool* pool);  // cancels what is queued, waits for what runs

// Returns at once. `checksums` as above, valid until the job is done.
PD_API pd_job* pd_submit(pd_pool* pool, const pd_plan* plan, int stores, int64_t timeout_ms, uint32_t* checksums,
                         uint64_t num_checksums);
PD_API int pd_job_poll(pd_job* job);                      // never blocks
PD_API int pd_job_wait(pd_job* job, int64_t timeout_ms);  // helps to copy; the state, 0 (running) at the timeout
PD_API void pd_job_cancel(pd_job* job);                   // pd_job_wait() says when nothing is touched any more
PD_API void pd_job_free(pd_job* job);                     // cancels, and waits until nothing is touched any more

// ---- shared memory (bind/c_api_arena.cpp) ----------------------------------------------------------------------

typedef struct pd_arena pd_arena;
typedef struct pd_mapping pd_mapping;

// See pd/arena.h. `numa_node` negative: wherever the kernel likes.
PD_API pd_arena* pd_arena_create(const char* name, uint64_t num_bytes, int numa_node);
PD_API void pd_arena_free(pd_arena* arena);  // unmaps and closes the descriptor
PD_API int pd_arena_fd(const pd_arena* arena);
PD_API int pd_arena_numa_errno(const pd_arena* arena);  // why the node was not accepted, or 0
PD_API uint64_t pd_arena_address(const pd_arena* arena);
PD_API uint64_t pd_arena_num_bytes(const pd_arena* arena);  // rounded up to 2 MiB

// PD_ERROR_MEMORY where memory is short. `huge_bytes`: how much got huge pages; the result is the errno for which the
// rest did not, 0 if there is no such.
PD_API int pd_arena_populate(pd_arena* arena, uint64_t start, uint64_t bytes, uint32_t num_threads, int want_huge,
                             uint64_t* huge_bytes);

PD_API pd_mapping* pd_mapping_create(int fd, uint64_t num_bytes, int writable);
PD_API void pd_mapping_free(pd_mapping* mapping);
PD_API uint64_t pd_mapping_address(const pd_mapping* mapping);

PD_API int pd_find_numa_node(void);  // of this thread's CPUs; -1: one node only, or several in use

// ---- host data plane (bind/c_api_plane.cpp) --------------------------------------------------------------------

// One plane per process, described in pd/plane.h. Times are as above; `deadline_ns` is a reading of CLOCK_MONOTONIC.
typedef struct pd_plane pd_plane;
typedef struct pd_link pd_link;

// The fields of pd::Transfer.
typedef struct pd_transfer {
  int64_t local_cache;
  int64_t remote_cache;
  uint64_t local_tensor_start;
  uint64_t remote_tensor_start;
  uint64_t num_tensors;
  uint64_t local_base;
  uint64_t remote_base;
  uint64_t block_bytes;
  uint64_t last_bytes;
  uint64_t num_blocks;
  const int64_t* local_blocks;
  const int64_t* remote_blocks;
  uint64_t max_words;
  int64_t deadline_ns;
} pd_transfer;

typedef struct pd_outcome {
  int32_t status;  // pd::LinkStatus
  uint32_t peer_status;
  int64_t value;
  char text[256];
} pd_outcome;

typedef struct pd_event {
  uint64_t link_id;
  int32_t kind;  // pd::LinkEvent
  char text[256];
} pd_event;

#define PD_LINK_STATS 7   // calls, runs, pieces, bytes, posting_ns, moving_ns, failures
#define PD_PLANE_STATS 6  // connections, requests, refused, bytes, bad_frames, stalled

// `pool` may be null (copies run in their caller's thread), and must outlive the plane.
PD_API pd_plane* pd_plane_create(uint32_t num_threads, int64_t transfer_timeout_ms, pd_pool* pool);
PD_API void pd_plane_free(pd_plane* plane);  // ends all connections, joins the threads
PD_API int pd_plane_add_cache(pd_plane* plane, int64_t id, uint64_t num_tensors, const uint64_t* tensors,
                              uint64_t tensor_bytes, int accessible);
PD_API int pd_plane_remove_cache(pd_plane* plane, int64_t id, int64_t timeout_ms);  // 1: nothing touches it; 0: not yet
// Takes the descriptors, also on failure.
PD_API pd_link* pd_plane_open_link(pd_plane* plane, uint64_t num_request, const int32_t* request_fds,
                                   uint64_t num_serve, const int32_t* serve_fds, int64_t last_local_cache);
PD_API int pd_plane_wait_event(pd_plane* plane, int64_t timeout_ms, pd_event* event);  // 1: an event; 0: none, or woken
PD_API void pd_plane_wake(pd_plane* plane);
PD_API void pd_plane_stats(const pd_plane* plane, uint64_t* stats);

PD_API uint64_t pd_link_id(const pd_link* link);
PD_API int pd_link_add_cache(pd_link* link, int64_t id, uint64_t num_tensors, uint64_t tensor_bytes,
                             const uint64_t* mapped);  // null: not mapped here
// Block until nothing is touched any more. 0, and `outcome` says how it ended.
PD_API int pd_link_read(pd_link* link, const pd_transfer* transfer, pd_outcome* outcome);   // remote to local
PD_API int pd_link_write(pd_link* link, const pd_transfer* transfer, pd_outcome* outcome);  // local to remote
PD_API void pd_link_cut(pd_link* link);
PD_API void pd_link_close(pd_link* link, int64_t timeout_ms);
PD_API void pd_link_free(pd_link* link);
PD_API void pd_link_stats(const pd_link* link, uint64_t* stats);

PD_API void pd_blocks_range(uint64_t num_blocks, const int64_t* blocks,
                            int64_t* range);  // lowest, highest; 0, -1: none

#ifdef __cplusplus
}
#endif
