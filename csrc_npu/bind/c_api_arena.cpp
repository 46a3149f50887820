// SPDX-License-Identifier: Apache-2.0
// Shared memory: arenas of this process, mappings of a peer's.
#include "errors.h"
#include "pd/arena.h"
#include "pd/c_api.h"
#include "pd/check.h"

struct pd_arena {
  pd::Arena arena;
};

struct pd_mapping {
  pd::SharedMapping mapping;
};

using pd::bind::guarded;

extern "C" {

pd_arena* pd_arena_create(const char* name, uint64_t num_bytes, int numa_node) {
  return guarded([&] {
    pd::require(name != nullptr, "an arena without a name");
    return new pd_arena{pd::Arena(name, num_bytes, numa_node)};
  });
}

void pd_arena_free(pd_arena* arena) { delete arena; }
int pd_arena_fd(const pd_arena* arena) { return arena->arena.fd(); }
int pd_arena_numa_errno(const pd_arena* arena) { return arena->arena.numa_errno(); }
uint64_t pd_arena_address(const pd_arena* arena) { return arena->arena.address(); }
uint64_t pd_arena_num_bytes(const pd_arena* arena) { return arena->arena.num_bytes(); }

int pd_arena_populate(pd_arena* arena, uint64_t start, uint64_t bytes, uint32_t num_threads, int want_huge,
                      uint64_t* huge_bytes) {
  return guarded([&] {
    pd::require(arena != nullptr && huge_bytes != nullptr, "no arena, or no place for the result");
    const pd::Populated done = arena->arena.populate(start, bytes, num_threads, want_huge != 0);
    *huge_bytes = done.huge_bytes;
    return done.huge_errno;
  });
}

pd_mapping* pd_mapping_create(int fd, uint64_t num_bytes, int writable) {
  return guarded([&] { return new pd_mapping{pd::SharedMapping(fd, num_bytes, writable != 0)}; });
}

void pd_mapping_free(pd_mapping* mapping) { delete mapping; }
uint64_t pd_mapping_address(const pd_mapping* mapping) { return mapping->mapping.address(); }

int pd_find_numa_node(void) {
  static constexpr int kNone = -1;
  const int node = guarded([] { return pd::find_numa_node(); });
  return node < 0 ? kNone : node;
}
}
