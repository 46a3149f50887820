// SPDX-License-Identifier: Apache-2.0
// Devices, contexts, switches and messages of the stand-in. A switch that changes nothing in host memory (profiling,
// dumps, overflow modes) is accepted here by name; every other function is a stub that reports an error.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "standin.h"

using standin::kOk;

namespace {

constexpr std::uint32_t kNumDevices = 2;
thread_local std::int32_t current_device = 0;
int context;  // its address is the context's handle

bool is_verbose() {
  static const bool verbose = std::getenv("PD_ACL_VERBOSE") != nullptr;
  return verbose;
}

}  // namespace

extern "C" {

// Called by the generated stubs. Says once per call what is missing; never success.
aclError pd_acl_unimplemented(const char* name) {
  standin::count(standin::kUnimplemented);
  if (is_verbose()) std::fprintf(stderr, "[stand-in] %s is not implemented\n", name);
  return standin::kNotSupported;
}

aclError aclInit(const char*) { return kOk; }
aclError aclFinalize() { return kOk; }
aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= static_cast<int32_t>(kNumDevices)) return standin::kInvalid;
  current_device = device;
  return kOk;
}
aclError aclrtResetDevice(int32_t) { return kOk; }
aclError aclrtGetDevice(int32_t* device) {
  *device = current_device;
  return kOk;
}
aclError aclrtGetDeviceCount(uint32_t* devices) {
  *devices = kNumDevices;
  return kOk;
}
aclError aclrtGetCurrentContext(aclrtContext* current) {
  *current = &context;
  return kOk;
}
aclError aclrtSetCurrentContext(aclrtContext) { return kOk; }
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags != nullptr) *flags = 0;
  if (active != nullptr) *active = 1;
  return kOk;
}
const char* aclrtGetSocName() { return "Ascend910B3"; }
const char* aclGetRecentErrMsg() { return "(the stand-in has no more to say)"; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return kOk; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return kOk; }
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
  *value = 20;
  return kOk;
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) {
  *value = 20;
  return kOk;
}
aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return kOk;
}
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return kOk; }
aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = 1;
  return kOk;
}

// Reports of callbacks come straight from the stream's thread here.
aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return kOk; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return kOk; }
aclError aclrtProcessReport(int32_t) {
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return kOk;
}

void aclAppLog(aclLogLevel level, const char* function, const char*, uint32_t, const char* format, ...) {
  if (level < ACL_ERROR && !is_verbose()) return;
  std::va_list values;
  va_start(values, format);
  std::fprintf(stderr, "[stand-in] %s: ", function);
  std::vfprintf(stderr, format, values);
  std::fputc('\n', stderr);
  va_end(values);
}

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return kOk; }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return kOk; }
aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return kOk; }
aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
  *value = 0;
  return kOk;
}
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return kOk; }
aclError aclrtSetOpExecuteTimeOutV2(uint64_t, uint64_t* actual) {
  if (actual != nullptr) *actual = 0;
  return kOk;
}
aclError aclrtSetOpWaitTimeout(uint32_t) { return kOk; }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return kOk; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return kOk; }
aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) {
  *flag = 0;
  return kOk;
}
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return kOk; }

}  // extern "C"
