// SPDX-License-Identifier: Apache-2.0
#include "errors.h"

#include <cerrno>

namespace pd::bind {
namespace {

thread_local std::string last_error;
thread_local int last_errno = 0;

}  // namespace

void set_last_error(const char* text) noexcept {
  try {
    last_error = text;
  } catch (...) {
    last_error.clear();  // no memory for the text: the code has to do
  }
}

int keep_exception() noexcept {
  last_errno = 0;
  try {
    throw;
  } catch (const std::bad_alloc&) {
    set_last_error("out of memory");
    return PD_ERROR_MEMORY;
  } catch (const std::length_error&) {
    set_last_error("out of memory: more elements than a vector can hold");
    return PD_ERROR_MEMORY;
  } catch (const std::invalid_argument& error) {
    set_last_error(error.what());
    return PD_ERROR_INVALID;
  } catch (const std::system_error& error) {
    set_last_error(error.what());
    last_errno = error.code().value();
    const bool is_short = last_errno == ENOMEM || last_errno == ENOSPC;
    return is_short ? PD_ERROR_MEMORY : PD_ERROR_SYSTEM;
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return PD_ERROR_INTERNAL;
  } catch (...) {
    set_last_error("unknown exception");
    return PD_ERROR_INTERNAL;
  }
}

}  // namespace pd::bind

extern "C" {

int pd_abi_version(void) { return PD_ABI_VERSION; }

const char* pd_last_error(void) { return pd::bind::last_error.c_str(); }

int pd_last_errno(void) { return pd::bind::last_errno; }
}
