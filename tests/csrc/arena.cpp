// SPDX-License-Identifier: Apache-2.0
// Shared memory: alignment, seals, population by several threads, readers, and what does not fit.
#include "pd/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>

#include "testing.h"

namespace {

constexpr std::uint64_t kMiB = 1u << 20;

char* pointer(std::uint64_t address) { return reinterpret_cast<char*>(address); }

std::uint64_t allocated_bytes(int fd) {
  struct stat file{};
  CHECK_EQUAL(fstat(fd, &file), 0);
  return static_cast<std::uint64_t>(file.st_blocks) * 512;
}

}  // namespace

TEST(several_threads_populate_every_page_with_zeros) {
  pd::Arena arena("test", 50 * kMiB, -1);
  CHECK_EQUAL(arena.address() % pd::kArenaAlignment, 0u);
  CHECK_EQUAL(allocated_bytes(arena.fd()), 0u);
  const pd::Populated done = arena.populate(0, arena.num_bytes(), 3);
  CHECK_EQUAL(allocated_bytes(arena.fd()), 50 * kMiB);
  CHECK((done.huge_bytes == 50 * kMiB) == (done.huge_errno == 0));
  CHECK(
      std::all_of(pointer(arena.address()), pointer(arena.address()) + 50 * kMiB, [](char byte) { return byte == 0; }));
}

TEST(a_part_is_populated_and_the_rest_is_not) {
  pd::Arena arena("test", 8 * kMiB, -1);
  arena.populate(4 * kMiB, 2 * kMiB, 1, false);
  CHECK_EQUAL(allocated_bytes(arena.fd()), 2 * kMiB);
}

TEST(parts_outside_or_unaligned_are_refused) {
  pd::Arena arena("test", 8 * kMiB, -1);
  CHECK_THROWS(std::invalid_argument, "beyond the arena's end", arena.populate(8 * kMiB, 2 * kMiB, 1));
  CHECK_THROWS(std::invalid_argument, "beyond the arena's end", arena.populate(2 * kMiB, ~std::uint64_t{0} << 21, 1));
  CHECK_THROWS(std::invalid_argument, "not aligned", arena.populate(4096, 2 * kMiB, 1));
  CHECK_THROWS(std::invalid_argument, "zero bytes", pd::Arena("test", 0, -1));
  CHECK_THROWS(std::invalid_argument, "does not fit", pd::Arena("test", ~std::uint64_t{0}, -1));
}

TEST(the_seals_hold) {
  pd::Arena arena("test", 4 * kMiB, -1);
  CHECK(ftruncate(arena.fd(), 2 * kMiB) != 0 && errno == EPERM);
  CHECK(ftruncate(arena.fd(), 8 * kMiB) != 0 && errno == EPERM);
  CHECK_THROWS(std::system_error, "cannot map", pd::SharedMapping(arena.fd(), 4 * kMiB, true));
  CHECK(pwrite(arena.fd(), "x", 1, 0) < 0 && errno == EPERM);
}

TEST(a_reader_sees_what_the_owner_writes_and_outlives_it) {
  auto arena = std::make_unique<pd::Arena>("test", 4 * kMiB, -1);
  const pd::SharedMapping reader(arena->fd(), 4 * kMiB, false);
  CHECK_EQUAL(reader.address() % pd::kArenaAlignment, 0u);
  pointer(arena->address())[3 * kMiB] = 'x';
  CHECK_EQUAL(pointer(reader.address())[3 * kMiB], 'x');
  arena.reset();
  CHECK_EQUAL(pointer(reader.address())[3 * kMiB], 'x');
}

TEST(a_refused_node_is_remembered_and_the_arena_works) {
  pd::Arena arena("test", 2 * kMiB, 1000);
  CHECK(arena.numa_errno() != 0);
  arena.populate(0, 2 * kMiB, 1);
  CHECK_EQUAL(allocated_bytes(arena.fd()), 2 * kMiB);
}

TEST(the_node_of_the_threads_cpus_is_found) {
  namespace fs = std::filesystem;
  char folder[] = "/tmp/pd-numa-XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  const fs::path nodes = fs::path(folder) / "sys/devices/system/node";
  const auto write = [&](const char* node, const char* cpus) {
    fs::create_directories(nodes / node);
    std::ofstream(nodes / node / "cpulist") << cpus << "\n";
  };
  CHECK_EQUAL(pd::find_numa_node(folder), -1);  // no such folder
  write("node0", "2000-2003");
  CHECK_EQUAL(pd::find_numa_node(folder), -1);  // one node only
  write("node1", "0-1023");
  CHECK_EQUAL(pd::find_numa_node(folder), 1);
  write("node0", "0,2000");
  write("node1", "1-1023");
  const bool uses_both = sysconf(_SC_NPROCESSORS_ONLN) > 1;
  if (uses_both) CHECK_EQUAL(pd::find_numa_node(folder), -1);
  fs::remove_all(folder);
}
