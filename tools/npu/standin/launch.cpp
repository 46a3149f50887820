// SPDX-License-Identifier: Apache-2.0
// Kernels of the stand-in: a "binary" is a shared object of this machine. Each kernel is exported under its name as
// `void kernel(void* args, uint64_t args_bytes, uint32_t grid)` and runs its whole grid when the stream comes to it.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "standin.h"

namespace standin {
namespace {

using Kernel = void (*)(void* args, std::uint64_t args_bytes, std::uint32_t grid);

std::atomic<int> launches_to_fail{0};

aclError launch(aclrtFuncHandle function, std::uint32_t grid, const void* args, std::size_t bytes, aclrtStream stream) {
  if (function == nullptr || args == nullptr || grid == 0) return kInvalid;
  if (launches_to_fail > 0 && launches_to_fail-- > 0) return kInvalid;
  count(kLaunches);
  const auto* const first = static_cast<const unsigned char*>(args);
  std::vector<unsigned char> copied(first, first + bytes);  // as the runtime does: the caller's may go at once
  resolve(stream).post([kernel = reinterpret_cast<Kernel>(function), grid, copied = std::move(copied)]() mutable {
    kernel(copied.data(), copied.size(), grid);
  });
  return kOk;
}

}  // namespace
}  // namespace standin

using standin::kInvalid;
using standin::kOk;

extern "C" {

// For the tests: the next launches are refused.
void pd_acl_fail_launches(int count) { standin::launches_to_fail = count; }

aclError aclrtBinaryLoadFromFile(const char* path, aclrtBinaryLoadOptions*, aclrtBinHandle* binary) {
  *binary = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (*binary == nullptr) std::fprintf(stderr, "[stand-in] %s\n", dlerror());
  return *binary != nullptr ? kOk : kInvalid;
}
aclError aclrtBinaryUnLoad(aclrtBinHandle binary) { return dlclose(binary) == 0 ? kOk : kInvalid; }
aclError aclrtBinaryGetFunction(const aclrtBinHandle binary, const char* name, aclrtFuncHandle* function) {
  *function = dlsym(binary, name);
  return *function != nullptr ? kOk : kInvalid;
}
aclError aclrtLaunchKernel(aclrtFuncHandle function, uint32_t grid, const void* args, size_t bytes,
                           aclrtStream stream) {
  return standin::launch(function, grid, args, bytes, stream);
}
aclError aclrtLaunchKernelWithHostArgs(aclrtFuncHandle function, uint32_t grid, aclrtStream stream,
                                       aclrtLaunchKernelCfg*, void* args, size_t bytes, aclrtPlaceHolderInfo*,
                                       size_t num_placeholders) {
  if (num_placeholders != 0) return standin::kNotSupported;
  return standin::launch(function, grid, args, bytes, stream);
}

}  // extern "C"
