// SPDX-License-Identifier: Apache-2.0
// Turns exceptions into the codes and the text of the C ABI. Every function of bind/ runs its body in here.
#pragma once

#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <type_traits>

#include "pd/c_api.h"

namespace pd::bind {

void set_last_error(const char* text) noexcept;  // of this thread

// Inside a catch block: keeps the exception's text and returns its code.
int keep_exception() noexcept;

// What `body` returns; when it throws, null for a pointer and the negative code for an integer.
template <typename Body>
auto guarded(Body body) noexcept -> std::invoke_result_t<Body> {
  using Result = std::invoke_result_t<Body>;
  try {
    return body();
  } catch (...) {
    const int code = keep_exception();
    if constexpr (std::is_pointer_v<Result>) {
      return nullptr;
    } else {
      return static_cast<Result>(code);
    }
  }
}

}  // namespace pd::bind
