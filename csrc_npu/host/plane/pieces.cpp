// SPDX-License-Identifier: Apache-2.0
#include "pieces.h"

#include <algorithm>

namespace pd {
namespace {

// Builds runs from pieces that come one after the other.
class RunBuilder {
 public:
  void add(std::uint64_t local, std::uint64_t remote, std::uint64_t bytes) {
    ++runs_.num_pieces;
    if (!runs_.local.empty() && joins(local, remote, bytes)) {
      SideRun& ours = runs_.local.back();
      SideRun& theirs = runs_.remote.back();
      if (ours.count == 1) {
        ours.stride = distance(ours.offset, local);
        theirs.stride = distance(theirs.offset, remote);
      }
      ours.count = ++theirs.count;
      return;
    }
    runs_.local.push_back({local, bytes, 1, 0});
    runs_.remote.push_back({remote, bytes, 1, 0});
  }

  PairedRuns take() { return std::move(runs_); }

 private:
  static std::int64_t distance(std::uint64_t from, std::uint64_t to) {
    return static_cast<std::int64_t>(to) - static_cast<std::int64_t>(from);
  }

  static bool is_next(const SideRun& run, std::uint64_t offset) {
    if (run.count > 1) {
      return distance(run.offset, offset) == run.stride * static_cast<std::int64_t>(run.count);
    }
    const std::int64_t stride = distance(run.offset, offset);
    return static_cast<std::uint64_t>(stride < 0 ? -stride : stride) >= run.bytes;  // a server takes no overlap
  }

  bool joins(std::uint64_t local, std::uint64_t remote, std::uint64_t bytes) const {
    const SideRun& ours = runs_.local.back();
    return ours.bytes == bytes && is_next(ours, local) && is_next(runs_.remote.back(), remote);
  }

  PairedRuns runs_;
};

bool continues(const Transfer& transfer, std::size_t at) {
  return transfer.local_blocks[at] == transfer.local_blocks[at - 1] + 1 &&
         transfer.remote_blocks[at] == transfer.remote_blocks[at - 1] + 1;
}

}  // namespace

std::uint64_t count_pieces(const Transfer& transfer) {
  std::uint64_t count = transfer.local_blocks.empty() ? 0 : 1;
  for (std::size_t at = 1; at < transfer.local_blocks.size(); ++at) {
    count += continues(transfer, at) ? 0 : 1;
  }
  return count;
}

PairedRuns pair_runs(const Transfer& transfer) {
  RunBuilder builder;
  const std::size_t count = transfer.local_blocks.size();
  for (std::size_t start = 0; start < count;) {
    std::size_t stop = start + 1;
    while (stop < count && continues(transfer, stop)) {
      ++stop;
    }
    std::uint64_t bytes = (stop - start) * transfer.block_bytes;
    if (stop == count) {
      bytes -= transfer.block_bytes - transfer.last_bytes;
    }
    const auto local = static_cast<std::uint64_t>(transfer.local_blocks[start]) * transfer.block_bytes;
    const auto remote = static_cast<std::uint64_t>(transfer.remote_blocks[start]) * transfer.block_bytes;
    builder.add(transfer.local_base + local, transfer.remote_base + remote, bytes);
    start = stop;
  }
  return builder.take();
}

std::ptrdiff_t find_outside(std::span<const std::int64_t> blocks, std::uint64_t base, std::uint64_t block_bytes,
                            std::uint64_t last_bytes, std::uint64_t tensor_bytes) {
  const std::size_t count = blocks.size();
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t size = i + 1 == count ? last_bytes : block_bytes;
    const auto end = static_cast<__int128>(base) + static_cast<__int128>(blocks[i]) * block_bytes + size;
    if (blocks[i] < 0 || end > static_cast<__int128>(tensor_bytes)) {
      return static_cast<std::ptrdiff_t>(i);
    }
  }
  return -1;
}

PieceCursor::PieceCursor(std::span<const std::uint64_t> tensors, std::span<const SideRun> runs,
                         std::uint64_t first_byte, std::uint64_t num_bytes)
    : tensors_(tensors), runs_(runs), remaining_(num_bytes) {
  const std::uint64_t per_tensor = bytes_per_tensor(runs);
  at_.tensor = first_byte / per_tensor;
  std::uint64_t left = first_byte % per_tensor;
  while (left > 0 && left >= runs_[at_.run].bytes * runs_[at_.run].count) {
    left -= runs_[at_.run].bytes * runs_[at_.run].count;
    ++at_.run;
  }
  at_.piece = left / runs_[at_.run].bytes;
  at_.within = left % runs_[at_.run].bytes;
}

std::uint64_t PieceCursor::address(const Position& at) const {
  const SideRun& run = runs_[at.run];
  const std::uint64_t offset = run.offset + static_cast<std::uint64_t>(run.stride) * at.piece;  // wraps as it should
  return tensors_[at.tensor] + offset + at.within;
}

void PieceCursor::step(Position& at, std::uint64_t num_bytes) const {
  at.within += num_bytes;
  if (at.within < runs_[at.run].bytes) {
    return;
  }
  at.within = 0;
  if (++at.piece < runs_[at.run].count) {
    return;
  }
  at.piece = 0;
  if (++at.run == runs_.size()) {
    at.run = 0;
    ++at.tensor;
  }
}

std::size_t PieceCursor::peek(std::span<iovec> out, std::uint64_t max_bytes) const {
  Position at = at_;
  std::size_t used = 0;
  std::uint64_t room = std::min(remaining_, max_bytes);
  while (room > 0) {
    const std::uint64_t size = std::min(room, left_in_piece(at));
    const std::uint64_t start = address(at);
    const bool follows =
        used > 0 && reinterpret_cast<std::uint64_t>(out[used - 1].iov_base) + out[used - 1].iov_len == start;
    if (follows) {
      out[used - 1].iov_len += size;
    } else if (used == out.size()) {
      break;
    } else {
      out[used++] = {reinterpret_cast<void*>(start), size};
    }
    room -= size;
    step(at, size);
  }
  return used;
}

void PieceCursor::advance(std::uint64_t num_bytes) {
  remaining_ -= num_bytes;
  while (num_bytes > 0) {
    const std::uint64_t size = std::min(num_bytes, left_in_piece(at_));
    step(at_, size);
    num_bytes -= size;
  }
}

}  // namespace pd
