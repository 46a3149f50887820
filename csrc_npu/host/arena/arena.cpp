// SPDX-License-Identifier: Apache-2.0
#include "pd/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "pd/check.h"

namespace pd {
namespace {

// Newer than the oldest C library that we link to. Source: Linux UAPI headers.
constexpr int kMadvisePopulateWrite = 23;  // Linux 5.14
constexpr int kMadviseCollapse = 25;       // Linux 6.1
constexpr int kSealFutureWrite = 0x10;     // Linux 5.1
constexpr int kPolicyPreferred = 1;

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kStepBytes = 16u << 20;  // what a thread takes at a time

[[noreturn]] void throw_errno(int code, const char* what) {
  throw std::system_error(code, std::generic_category(), what);
}

void* at(std::uint64_t address) { return reinterpret_cast<void*>(address); }

void touch(std::uint64_t address) { *reinterpret_cast<volatile char*>(address) = 0; }

int make_sealable_file(const std::string& name, std::uint64_t num_bytes) {
  const int fd = memfd_create(("vllm-pd:" + name).substr(0, 200).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw_errno(errno, "memfd_create");
  if (ftruncate(fd, static_cast<off_t>(num_bytes)) != 0) {
    const int code = errno;
    close(fd);
    throw_errno(code, "ftruncate of a memory file");
  }
  return fd;
}

int prefer_node(std::uint64_t address, std::uint64_t bytes, int node) {
  constexpr unsigned kWordBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(static_cast<unsigned>(node) / kWordBits + 1);
  mask.back() = 1ul << (static_cast<unsigned>(node) % kWordBits);
  const unsigned long num_bits = mask.size() * kWordBits + 1;  // the kernel counts one less than it is told
  return syscall(SYS_mbind, address, bytes, kPolicyPreferred, mask.data(), num_bits, 0u) == 0 ? 0 : errno;
}

// Memory for a range of the file, so that touching it cannot fail.
void allocate(int fd, std::uint64_t start, std::uint64_t bytes) {
  int code = 0;
  do {
    code = fallocate(fd, 0, static_cast<off_t>(start), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  } while (code == EINTR);
  if (code != 0) throw_errno(code, "fallocate of a memory file");
}

// One thread's part of populate(). `base` is the address of the arena.
class Populating {
 public:
  Populating(int fd, std::uint64_t base, bool want_huge) : fd_(fd), base_(base), want_huge_(want_huge) {}

  void run(std::uint64_t start, std::uint64_t bytes) {
    if (want_huge_ && result.huge_errno == 0) {
      // Of each huge page one small one is made, then the kernel puts the huge one in its place: cheaper than 512.
      for (std::uint64_t page = start; page < start + bytes; page += kArenaAlignment) {
        allocate(fd_, page, kPage);
        touch(base_ + page);
      }
      result.huge_errno = madvise(at(base_ + start), bytes, kMadviseCollapse) == 0 ? 0 : errno;
      if (result.huge_errno == 0) result.huge_bytes += bytes;
    }
    allocate(fd_, start, bytes);
    if (madvise(at(base_ + start), bytes, kMadvisePopulateWrite) != 0) {
      for (std::uint64_t page = start; page < start + bytes; page += kPage) touch(base_ + page);
    }
  }

  Populated result;

 private:
  int fd_;
  std::uint64_t base_;
  bool want_huge_;
};

}  // namespace

Arena::Arena(const std::string& name, std::uint64_t num_bytes, int numa_node) {
  require(num_bytes > 0, "an arena of zero bytes");
  const std::uint64_t rounded =
      add_checked(num_bytes, kArenaAlignment - 1, "arena") / kArenaAlignment * kArenaAlignment;
  fd_ = make_sealable_file(name, rounded);
  try {
    mapping_ = std::make_unique<SharedMapping>(fd_, num_bytes, true);
    // The mapping that is there stays writable; nobody can make another writable one.
    if (fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | kSealFutureWrite) != 0) throw_errno(errno, "F_ADD_SEALS");
  } catch (...) {
    close(fd_);
    throw;
  }
  if (numa_node >= 0) numa_errno_ = prefer_node(address(), rounded, numa_node);
  madvise(at(address()), rounded, MADV_HUGEPAGE);  // a hint for kernels that want to be asked
}

Arena::~Arena() { close(fd_); }

Populated Arena::populate(std::uint64_t start, std::uint64_t bytes, unsigned num_threads, bool want_huge) {
  require(start % kArenaAlignment == 0 && bytes % kArenaAlignment == 0, "a part of an arena that is not aligned");
  require(start <= num_bytes() && bytes <= num_bytes() - start, "a part beyond the arena's end");
  std::atomic<std::uint64_t> next{0};
  std::mutex mutex;  // guards total and failure
  Populated total;
  std::exception_ptr failure;
  const auto work = [&] {
    Populating part(fd_, address(), want_huge);
    try {
      for (std::uint64_t done = next.fetch_add(kStepBytes); done < bytes; done = next.fetch_add(kStepBytes)) {
        part.run(start + done, std::min(kStepBytes, bytes - done));
      }
    } catch (...) {
      next = bytes;
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
    }
    const std::lock_guard lock(mutex);
    total.huge_bytes += part.result.huge_bytes;
    if (total.huge_errno == 0) total.huge_errno = part.result.huge_errno;
  };
  std::vector<std::thread> helpers;
  bool has_more = true;
  while (has_more && helpers.size() + 1 < num_threads) {
    try {
      helpers.emplace_back(work);
    } catch (const std::system_error&) {
      has_more = false;  // no more threads to be had: this one does it, slower
    }
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
  return total;
}

}  // namespace pd
