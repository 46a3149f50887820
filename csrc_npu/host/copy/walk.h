// SPDX-License-Identifier: Apache-2.0
// A plan's bytes as one line (part by part, tensor by tensor, run by run, piece by piece) that can be cut anywhere:
// how the work is shared out, and how often cancellation and deadline are looked at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "pd/copy_plan.h"

namespace pd {

inline constexpr std::uint64_t kChunkBytes = 512u << 10;

// The plan must outlive it, unchanged.
class PlanWalk {
 public:
  using CopyRow = void (*)(const PieceRow& row);

  explicit PlanWalk(const CopyPlan& plan);

  std::uint64_t num_chunks() const { return (num_bytes_ + kChunkBytes - 1) / kChunkBytes; }

  // Copies one chunk; chunks together are the plan, and none splits a small piece. Any thread.
  void copy_chunk(std::uint64_t chunk, CopyRow copy_row) const;

 private:
  struct Position {
    std::size_t part = 0;
    std::size_t tensor = 0;
    std::size_t run = 0;
    std::uint64_t piece = 0;  // of the run
    std::uint64_t byte = 0;   // of the piece
    std::uint64_t flat = 0;   // bytes before it on the line
  };

  Position find(std::uint64_t flat) const;
  void step_run(Position& at) const;
  std::uint64_t copy_rows(const Position& at, std::uint64_t bytes, CopyRow copy_row) const;
  const std::byte* next_row_source(const Position& at, std::uint64_t outer) const;

  const CopyPlan& plan_;
  std::uint64_t num_bytes_;
  std::vector<std::uint64_t> part_ends_;
};

}  // namespace pd
