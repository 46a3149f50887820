// SPDX-License-Identifier: Apache-2.0
// libacl_op_compiler of the stand-in: the options that torch_npu sets while it starts. There is no compiler.
#include <cstddef>
#include <cstring>

extern "C" {

int aclSetCompileopt(int, const char*) { return 0; }
std::size_t aclGetCompileoptSize(int) { return 16; }
int aclGetCompileopt(int, char* value, std::size_t room) {
  if (room < sizeof "enable") return 100000;
  std::memcpy(value, "enable", sizeof "enable");
  return 0;
}

}  // extern "C"
