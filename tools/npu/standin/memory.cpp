// SPDX-License-Identifier: Apache-2.0
// Device and host memory of the stand-in: fresh memory is poisoned, freed memory is poisoned and kept for a while, so
// that a copy which still uses it is counted and reads nonsense instead of what was there.
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "standin.h"

namespace standin {
namespace {

inline constexpr std::size_t kAlignment = 512;
inline constexpr std::size_t kQuarantineBytes = std::size_t{512} << 20;

struct Allocation {
  std::size_t bytes;
  bool freed;
};

// Leaked on purpose: torch_npu's caches free memory while the process exits.
struct Heap {
  std::mutex mutex;
  std::map<std::uintptr_t, Allocation> allocations;
  std::deque<std::uintptr_t> quarantine;  // oldest first
  std::size_t used = 0, quarantined = 0;
  std::atomic<bool> refuse_2d{false};
  std::atomic<std::size_t> held_copy_bytes{SIZE_MAX};

  // The allocation that holds `address`, or end().
  auto find(std::uintptr_t address) {
    auto next = allocations.upper_bound(address);
    if (next == allocations.begin()) return allocations.end();
    --next;
    return address < next->first + next->second.bytes ? next : allocations.end();
  }

  void* allocate(std::size_t bytes) {
    void* const address = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (address == nullptr) return nullptr;
    std::memset(address, kFreshByte, bytes);
    const std::lock_guard lock(mutex);
    allocations[reinterpret_cast<std::uintptr_t>(address)] = {bytes, false};
    used += bytes;
    return address;
  }

  aclError release(void* address) {
    const std::lock_guard lock(mutex);
    const auto found = allocations.find(reinterpret_cast<std::uintptr_t>(address));
    if (found == allocations.end() || found->second.freed) return kInvalid;
    std::memset(address, kFreedByte, found->second.bytes);
    found->second.freed = true;
    used -= found->second.bytes;
    quarantined += found->second.bytes;
    quarantine.push_back(found->first);
    while (quarantined > kQuarantineBytes) {
      const auto oldest = allocations.find(quarantine.front());
      quarantined -= oldest->second.bytes;
      std::free(reinterpret_cast<void*>(oldest->first));
      allocations.erase(oldest);
      quarantine.pop_front();
    }
    return kOk;
  }
};

Heap& heap() {
  static auto* const instance = new Heap;
  return *instance;
}

void copy_now(void* dst, const void* src, std::size_t bytes) {
  check_access(dst, bytes);
  check_access(src, bytes);
  std::memmove(dst, src, bytes);
}

aclError post_copy(void* dst, std::size_t room, const void* src, std::size_t bytes, aclrtStream stream) {
  if (dst == nullptr || src == nullptr || bytes > room) return kInvalid;
  while (bytes == heap().held_copy_bytes) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  count(kCopies);
  resolve(stream).post([=] { copy_now(dst, src, bytes); });
  return kOk;
}

struct Rows {
  unsigned char* dst;
  std::size_t dst_pitch;
  const unsigned char* src;
  std::size_t src_pitch;
  std::size_t width;
  std::size_t height;
};

void copy_rows(const Rows& rows) {
  for (std::size_t i = 0; i < rows.height; ++i) {
    copy_now(rows.dst + i * rows.dst_pitch, rows.src + i * rows.src_pitch, rows.width);
  }
}

}  // namespace

void check_access(const void* address, std::size_t bytes) {
  const std::lock_guard lock(heap().mutex);
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const auto found = heap().find(begin);
  if (found == heap().allocations.end()) return;
  if (found->second.freed) count(kUseAfterFree);
  if (begin + bytes > found->first + found->second.bytes) count(kOutOfBounds);
}

bool is_device(const void* address) {
  const std::lock_guard lock(heap().mutex);
  return heap().find(reinterpret_cast<std::uintptr_t>(address)) != heap().allocations.end();
}

}  // namespace standin

using standin::count;
using standin::kInvalid;
using standin::kOk;

extern "C" {

// For the tests: refuse aclrtMemcpy2dAsync between device addresses, as a runtime without it would.
void pd_acl_refuse_2d(int refuse) { standin::heap().refuse_2d = refuse != 0; }

// For the tests: the call that posts a copy of this size does not return until another size is given, so that a later
// call can overtake it.
void pd_acl_hold_copies_of(size_t bytes) { standin::heap().held_copy_bytes = bytes; }

aclError aclrtMalloc(void** address, size_t bytes, aclrtMemMallocPolicy) {
  *address = standin::heap().allocate(bytes);
  return *address != nullptr ? kOk : standin::kOutOfMemory;
}
aclError aclrtMallocAlign32(void** address, size_t bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, bytes, policy);
}
aclError aclrtFree(void* address) { return standin::heap().release(address); }
aclError aclrtMallocHost(void** address, size_t bytes) {
  *address = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *address != nullptr ? kOk : standin::kOutOfMemory;
}
aclError aclrtMallocHostWithCfg(void** address, uint64_t bytes, aclrtMallocConfig*) {
  return aclrtMallocHost(address, bytes);
}
aclError aclrtFreeHost(void* address) {
  std::free(address);
  return kOk;
}
aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total_bytes) {
  const std::lock_guard lock(standin::heap().mutex);
  *total_bytes = standin::kDeviceBytes;
  *free_bytes = standin::kDeviceBytes - standin::heap().used;
  return kOk;
}
aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->location.type = standin::is_device(address) ? ACL_MEM_LOCATION_TYPE_DEVICE : ACL_MEM_LOCATION_TYPE_HOST;
  return kOk;
}

aclError aclrtMemset(void* address, size_t room, int32_t value, size_t bytes) {
  if (bytes > room) return kInvalid;
  count(standin::kHostSyncs);
  standin::check_access(address, bytes);
  std::memset(address, value, bytes);
  return kOk;
}
aclError aclrtMemsetAsync(void* address, size_t room, int32_t value, size_t bytes, aclrtStream stream) {
  if (bytes > room) return kInvalid;
  standin::resolve(stream).post([=] {
    standin::check_access(address, bytes);
    std::memset(address, value, bytes);
  });
  return kOk;
}
aclError aclrtMemcpy(void* dst, size_t room, const void* src, size_t bytes, aclrtMemcpyKind) {
  if (bytes > room) return kInvalid;
  count(standin::kHostSyncs);
  standin::copy_now(dst, src, bytes);
  return kOk;
}
aclError aclrtMemcpyAsync(void* dst, size_t room, const void* src, size_t bytes, aclrtMemcpyKind, aclrtStream stream) {
  return standin::post_copy(dst, room, src, bytes, stream);
}
aclError aclrtMemcpyAsyncWithCondition(void* dst, size_t room, const void* src, size_t bytes, aclrtMemcpyKind,
                                       aclrtStream stream) {
  return standin::post_copy(dst, room, src, bytes, stream);
}
aclError aclrtMemcpy2dAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width, size_t height,
                            aclrtMemcpyKind kind, aclrtStream stream) {
  if (dst == nullptr || src == nullptr || width > dst_pitch || width > src_pitch) return kInvalid;
  if (standin::heap().refuse_2d && kind == ACL_MEMCPY_DEVICE_TO_DEVICE) return standin::kNotSupported;
  count(standin::kCopies);
  count(standin::kCopies2d);
  const standin::Rows rows{
      static_cast<unsigned char*>(dst), dst_pitch, static_cast<const unsigned char*>(src), src_pitch, width, height};
  standin::resolve(stream).post([rows] { standin::copy_rows(rows); });
  return kOk;
}

}  // extern "C"
