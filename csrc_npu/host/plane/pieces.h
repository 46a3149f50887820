// SPDX-License-Identifier: Apache-2.0
// From block pairs to runs, and from runs to the memory that a system call takes. Pure: nothing is dereferenced.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pd/plane.h"
#include "wire.h"

namespace pd {

// Both sides of a transfer: run i moves the same pieces, and there are as many.
struct PairedRuns {
  std::vector<SideRun> local;
  std::vector<SideRun> remote;
  std::uint64_t num_pieces = 0;  // per tensor, consecutive blocks merged
};

// Blocks that follow one another on both sides become one piece; equal pieces at equal distances become one run.
PairedRuns pair_runs(const Transfer& transfer);

// Blocks with consecutive ones merged: what one tensor's part of the transfer consists of.
std::uint64_t count_pieces(const Transfer& transfer);

// The first block that is negative or does not lie inside the tensor with all its bytes; -1: there is none.
// Returns its position in `blocks`.
std::ptrdiff_t find_outside(std::span<const std::int64_t> blocks, std::uint64_t base, std::uint64_t block_bytes,
                            std::uint64_t last_bytes, std::uint64_t tensor_bytes);

// A position in the logical stream of runs over tensors. The runs must have been checked against the tensors.
class PieceCursor {
 public:
  PieceCursor() = default;
  // `tensors` and `runs` must outlive the cursor.
  PieceCursor(std::span<const std::uint64_t> tensors, std::span<const SideRun> runs, std::uint64_t first_byte,
              std::uint64_t num_bytes);

  std::uint64_t remaining() const { return remaining_; }
  // The next bytes, at most `max_bytes`, as at most `out.size()` ranges; the position stays.
  std::size_t peek(std::span<iovec> out, std::uint64_t max_bytes) const;
  void advance(std::uint64_t num_bytes);

 private:
  struct Position {
    std::size_t tensor = 0;
    std::size_t run = 0;
    std::uint64_t piece = 0;
    std::uint64_t within = 0;  // bytes of the piece that are behind us
  };
  std::uint64_t address(const Position& at) const;
  std::uint64_t left_in_piece(const Position& at) const { return runs_[at.run].bytes - at.within; }
  void step(Position& at, std::uint64_t num_bytes) const;  // at most to the end of the piece

  std::span<const std::uint64_t> tensors_;
  std::span<const SideRun> runs_;
  Position at_;
  std::uint64_t remaining_ = 0;
};

}  // namespace pd
