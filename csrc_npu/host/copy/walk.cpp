// SPDX-License-Identifier: Apache-2.0
#include "walk.h"

#include <algorithm>

namespace pd {
namespace {

constexpr std::uint64_t kWholePieceBytes = 128u << 10;  // pieces up to this are never split
constexpr std::uint64_t kSplitUnit = 4096;              // longer ones are, at multiples of this

// Wraps as addresses do; a negative stride is added as its complement.
std::uint64_t address(std::uint64_t tensor, std::uint64_t offset, std::uint64_t count, std::int64_t stride) {
  return tensor + offset + count * static_cast<std::uint64_t>(stride);
}

const std::byte* to_source(std::uint64_t address) { return reinterpret_cast<const std::byte*>(address); }
std::byte* to_destination(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

PlanWalk::PlanWalk(const CopyPlan& plan) : plan_(plan), num_bytes_(0) {
  part_ends_.reserve(plan.parts().size());
  for (const Part& part : plan.parts()) {
    num_bytes_ += part.tensor_bytes() * part.src_tensors.size();
    part_ends_.push_back(num_bytes_);
  }
}

// The first place at or after `flat` where the line may be cut (or, in a long piece, the last one before).
PlanWalk::Position PlanWalk::find(std::uint64_t flat) const {
  Position at;
  at.part = static_cast<std::size_t>(std::upper_bound(part_ends_.begin(), part_ends_.end(), flat) - part_ends_.begin());
  if (at.part == part_ends_.size()) {
    at.flat = num_bytes_;
    return at;
  }
  const Part& part = plan_.parts()[at.part];
  const std::uint64_t part_start = at.part == 0 ? 0 : part_ends_[at.part - 1];
  at.tensor = static_cast<std::size_t>((flat - part_start) / part.tensor_bytes());
  std::uint64_t rest = (flat - part_start) % part.tensor_bytes();
  const auto end = std::upper_bound(part.run_ends.begin(), part.run_ends.end(), rest);
  at.run = static_cast<std::size_t>(end - part.run_ends.begin());
  rest -= at.run == 0 ? 0 : part.run_ends[at.run - 1];
  const Run& run = part.runs[at.run];
  at.piece = rest / run.bytes;
  at.byte = rest % run.bytes;
  at.flat = flat;
  if (run.bytes > kWholePieceBytes) {
    at.flat -= at.byte % kSplitUnit;
    at.byte -= at.byte % kSplitUnit;
  } else if (at.byte > 0) {
    at.flat += run.bytes - at.byte;
    at.byte = 0;
    if (++at.piece == run.num_pieces()) step_run(at);
  }
  return at;
}

void PlanWalk::step_run(Position& at) const {
  const Part& part = plan_.parts()[at.part];
  at.piece = 0;
  at.byte = 0;
  if (++at.run < part.runs.size()) return;
  at.run = 0;
  if (++at.tensor < part.src_tensors.size()) return;
  at.tensor = 0;
  ++at.part;
}

// What comes after row `outer` of the run at `at`: where its first piece lies.
const std::byte* PlanWalk::next_row_source(const Position& at, std::uint64_t outer) const {
  const Part& part = plan_.parts()[at.part];
  const Run& run = part.runs[at.run];
  const std::uint64_t tensor = part.src_tensors[at.tensor];
  if (outer + 1 < run.outer_count) return to_source(address(tensor, run.src_offset, outer + 1, run.outer_src_stride));
  if (at.run + 1 < part.runs.size()) return to_source(tensor + part.runs[at.run + 1].src_offset);
  if (at.tensor + 1 < part.src_tensors.size()) {
    return to_source(part.src_tensors[at.tensor + 1] + part.runs[0].src_offset);
  }
  if (at.part + 1 == plan_.parts().size()) return nullptr;
  const Part& next = plan_.parts()[at.part + 1];
  return to_source(next.src_tensors[0] + next.runs[0].src_offset);
}

// Copies what lies in the run at `at`, at most `bytes`; returns how many that were.
std::uint64_t PlanWalk::copy_rows(const Position& at, std::uint64_t bytes, CopyRow copy_row) const {
  const Part& part = plan_.parts()[at.part];
  const Run& run = part.runs[at.run];
  const std::uint64_t src_tensor = part.src_tensors[at.tensor], dst_tensor = part.dst_tensors[at.tensor];
  std::uint64_t left = bytes, skip = at.byte;
  for (std::uint64_t piece = at.piece; left > 0 && piece < run.num_pieces();) {
    const std::uint64_t outer = piece / run.inner_count, inner = piece % run.inner_count;
    const std::uint64_t src = address(src_tensor, run.src_offset + skip, outer, run.outer_src_stride);
    const std::uint64_t dst = address(dst_tensor, run.dst_offset + skip, outer, run.outer_dst_stride);
    PieceRow row;
    row.src = to_source(address(src, 0, inner, run.inner_src_stride));
    row.dst = to_destination(address(dst, 0, inner, run.inner_dst_stride));
    row.src_stride = run.inner_src_stride;
    row.dst_stride = run.inner_dst_stride;
    if (skip > 0 || left < run.bytes) {
      row.bytes = std::min(run.bytes - skip, left);
      row.count = 1;
    } else {
      row.bytes = run.bytes;
      row.count = std::min(run.inner_count - inner, left / run.bytes);
    }
    if (left > row.bytes * row.count) row.next_src = next_row_source(at, outer);
    copy_row(row);
    left -= row.bytes * row.count;
    piece += row.count;
    skip = 0;
  }
  return bytes - left;
}

void PlanWalk::copy_chunk(std::uint64_t chunk, CopyRow copy_row) const {
  Position at = find(chunk * kChunkBytes);
  const Position end = find(std::min((chunk + 1) * kChunkBytes, num_bytes_));
  for (std::uint64_t left = end.flat - at.flat; left > 0;) {
    left -= copy_rows(at, left, copy_row);
    step_run(at);
  }
}

}  // namespace pd
