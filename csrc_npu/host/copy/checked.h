// SPDX-License-Identifier: Apache-2.0
// Copies of plans with checksums: block pair by block pair, each with all its tensors.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pd/copy_engine.h"

namespace pd {

// Throws std::invalid_argument unless the plan has checksums exactly where there are places for them.
void require_places(const CopyPlan& plan, std::span<const std::uint32_t> checksums);

class CheckedWalk {
 public:
  CheckedWalk(const CopyPlan& plan, std::span<std::uint32_t> checksums);

  std::uint64_t num_chunks() const { return num_chunks_; }

  // Copies one chunk's pairs and fills in their checksums, which are of exactly the bytes that were written.
  void copy_chunk(std::uint64_t chunk, bool streaming) const;

 private:
  const CopyPlan& plan_;
  std::span<std::uint32_t> checksums_;
  std::uint64_t pairs_per_chunk_ = 1;
  std::uint64_t num_chunks_ = 0;
};

}  // namespace pd
