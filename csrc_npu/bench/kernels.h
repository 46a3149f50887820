// SPDX-License-Identifier: Apache-2.0
// The copy kernels that the limit is searched among. One file per instruction set; each adds what its CPU can run.
#pragma once

#include <cstddef>
#include <vector>

namespace pd::bench {

struct Kernel {
  const char* name;
  // Copies one piece; `next` is the source of the piece after it (or nullptr), for kernels that prefetch.
  void (*copy)(void* destination, const void* source, std::size_t bytes, const void* next);
  void (*finish)();  // orders non-temporal stores; called once per thread and copy
};

void add_portable_kernels(std::vector<Kernel>& kernels);
void add_x86_kernels(std::vector<Kernel>& kernels);  // adds nothing on other CPUs

const std::vector<Kernel>& kernels();

}  // namespace pd::bench
