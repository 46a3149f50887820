// SPDX-License-Identifier: Apache-2.0
// Shared memory without a name: a sealed memory file at a 2 MiB-aligned address, its pages there from the start on the
// right NUMA node, in huge pages where the kernel gives any. The kernel frees it when the last process that maps it or
// holds its descriptor is gone, however that ended.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace pd {

inline constexpr std::uint64_t kArenaAlignment = 2u << 20;

// A shared file mapped at an aligned address; the descriptor is not kept. Throws std::system_error.
class SharedMapping {
 public:
  SharedMapping(int fd, std::uint64_t num_bytes, bool writable);
  ~SharedMapping();
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  std::uint64_t address() const { return address_; }
  std::uint64_t num_bytes() const { return num_bytes_; }  // rounded up to the alignment

 private:
  std::uint64_t num_bytes_;
  std::uint64_t address_ = 0;
};

// What populate() found out about huge pages.
struct Populated {
  std::uint64_t huge_bytes = 0;  // asked for and granted
  int huge_errno = 0;            // why the rest was not
};

class Arena {
 public:
  // The owner's mapping is the only writable one, ever: the file is sealed against that, and against resizing.
  // `numa_node` negative: wherever the kernel likes. Throws std::system_error, std::invalid_argument.
  Arena(const std::string& name, std::uint64_t num_bytes, int numa_node);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Makes the pages of a part of the arena, zeroed, with `num_threads` threads. `start` and `bytes` are multiples of
  // the alignment. Before the first use only: bytes already there may be overwritten by zeros. Throws
  // std::system_error with ENOMEM or ENOSPC where memory is short (a page that is touched without memory behind it
  // would kill the process instead).
  Populated populate(std::uint64_t start, std::uint64_t bytes, unsigned num_threads, bool want_huge = true);

  int fd() const { return fd_; }
  std::uint64_t address() const { return mapping_->address(); }
  std::uint64_t num_bytes() const { return mapping_->num_bytes(); }
  int numa_errno() const { return numa_errno_; }  // why the node was not accepted, or 0

 private:
  int fd_ = -1;
  int numa_errno_ = 0;
  std::unique_ptr<SharedMapping> mapping_;
};

// The NUMA node that all CPUs of this thread's affinity belong to; negative when there is only one node, or more than
// one is used. `root` is where sys is.
int find_numa_node(const std::string& root = "/");

}  // namespace pd
