// SPDX-License-Identifier: Apache-2.0
#include "kernel.h"

#include <stdexcept>

#include "acl/acl_rt.h"

namespace pd::npu {
namespace {

// The last word's padding is no part of what the kernel sees.
constexpr std::size_t kArgsBytes = offsetof(KernelArgs, grid_z) + sizeof(std::int32_t);

void require_ok(aclError error, const std::string& what) {
  if (error != ACL_SUCCESS) throw std::runtime_error(what + ": ACL error " + std::to_string(error));
}

void* load_function(const Entry& entry) {
  aclrtBinaryLoadOption magic{ACL_RT_BINARY_LOAD_OPT_MAGIC, {}};
  magic.value.magic = ACL_RT_BINARY_MAGIC_ELF_VECTOR_CORE;  // it runs on vector cores only
  aclrtBinaryLoadOptions options{&magic, 1};
  aclrtBinHandle binary = nullptr;
  require_ok(aclrtBinaryLoadFromFile(entry.path.c_str(), &options, &binary), "load kernel binary " + entry.path);
  void* function = nullptr;
  require_ok(aclrtBinaryGetFunction(binary, entry.name.c_str(), &function), entry.path + ": kernel " + entry.name);
  return function;
}

}  // namespace

Kernel::Kernel(const std::array<Entry, kNumRoles>& entries, std::uint32_t grid) : grid_(grid) {
  if (grid_ == 0) throw std::runtime_error("a kernel with a grid of 0");
  for (std::size_t role = 0; role < kNumRoles; ++role) {
    if (!entries[role].path.empty()) functions_[role] = load_function(entries[role]);
  }
  if (functions_[0] == nullptr || functions_[1] == nullptr) {
    throw std::runtime_error("a kernel needs an extract and an inject");
  }
}

int Kernel::launch(bool extract, bool short_pieces, KernelArgs args, void* stream) const {
  const std::size_t base = static_cast<std::size_t>(extract ? Role::kExtract : Role::kInject);
  const std::size_t pieces = static_cast<std::size_t>(extract ? Role::kExtractPieces : Role::kInjectPieces);
  void* const function = short_pieces && functions_[pieces] != nullptr ? functions_[pieces] : functions_[base];
  args.grid_x = static_cast<std::int32_t>(grid_);
  return aclrtLaunchKernelWithHostArgs(function, grid_, stream, nullptr, &args, kArgsBytes, nullptr, 0);
}

}  // namespace pd::npu
