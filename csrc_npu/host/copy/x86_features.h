// SPDX-License-Identifier: Apache-2.0
// What an x86 CPU and its operating system offer. (No __builtin_cpu_supports: not every toolchain links its tables.)
#pragma once

namespace pd {

bool has_sse42();
bool has_avx2();
bool has_avx512();  // F, BW and VL

}  // namespace pd
