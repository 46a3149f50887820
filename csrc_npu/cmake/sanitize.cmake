# SPDX-License-Identifier: Apache-2.0
# PD_SANITIZE=address|thread|undefined: everything with that sanitizer, first finding ends the program.

function(pd_add_sanitizer target)
  if(NOT PD_SANITIZE)
    return()
  endif()
  set(PD_KINDS_address address,undefined)
  set(PD_KINDS_thread thread)
  set(PD_KINDS_undefined undefined)
  if(NOT DEFINED PD_KINDS_${PD_SANITIZE})
    message(FATAL_ERROR "PD_SANITIZE is '${PD_SANITIZE}', want address, thread, undefined or nothing")
  endif()
  set(flags "-fsanitize=${PD_KINDS_${PD_SANITIZE}}" -fno-sanitize-recover=all)
  target_compile_options(${target} INTERFACE ${flags} -g -fno-omit-frame-pointer)
  target_link_options(${target} INTERFACE ${flags})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC documents these two as unreliable in instrumented code; the product build keeps them as errors.
    target_compile_options(${target} INTERFACE -Wno-maybe-uninitialized -Wno-error=tsan)
  endif()
endfunction()
