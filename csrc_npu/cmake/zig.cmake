# SPDX-License-Identifier: Apache-2.0
# CMake toolchain of the product build. tools/native gives the wrapper scripts' folder and the machine.
#
# CMake is told which compiler this is: finding out links programs without our flags, and each new set of flags makes
# zig build its C++ library again, which costs a minute.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES PD_WRAPPERS PD_TARGET_MACHINE PD_CLANG_VERSION)
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR "${PD_TARGET_MACHINE}")
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_CXX_COMPILER "${PD_WRAPPERS}/c++")
set(CMAKE_AR "${PD_WRAPPERS}/ar" CACHE FILEPATH "")
set(CMAKE_RANLIB "${PD_WRAPPERS}/ranlib" CACHE FILEPATH "")
set(CMAKE_CXX_COMPILER_ID_RUN TRUE)
set(CMAKE_CXX_COMPILER_ID Clang)
set(CMAKE_CXX_COMPILER_VERSION "${PD_CLANG_VERSION}")
set(CMAKE_CXX_STANDARD_COMPUTED_DEFAULT 17)
set(CMAKE_CXX_COMPILER_FORCED TRUE)
