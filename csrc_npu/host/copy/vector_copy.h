// SPDX-License-Identifier: Apache-2.0
// The copy loops, written once over the operations of one instruction set.
//
// Included by exactly the files kernel_*.cpp, after they defined PD_TARGET (function attributes that allow their
// instructions) and, in an unnamed namespace, `Vec`: kBytes, type, load(), store(), stream(), prefetch(). All of it has
// internal linkage: two instruction sets must never share an inline function.

namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kPage = 4096;
// Above this the C library's copy is as good; below it may fall into a microcode copy that is ten times slower where
// source and destination have nearly the same place in their pages. Source: measured on AMD Zen 3.
constexpr std::size_t kShortBytes = 32u << 10;
constexpr std::size_t kStreamBytes = 512;  // shorter unaligned pieces: their part lines cost more than they save

// Lines fetched at the start of the piece or page that comes next; the hardware's prefetcher goes on from there.
constexpr std::size_t kAheadLines = 4;
// Distance of the prefetch inside a piece: over the borders of pages, where the hardware's prefetcher begins anew.
// Source: 256 was the best of 0 to 2048 for pieces of 4 to 128 KiB on AMD Zen 3.
constexpr std::size_t kAheadBytes = 256;

// Two overlapping words: any length from one word to two.
template <typename Word>
PD_TARGET inline void copy_ends(std::byte* dst, const std::byte* src, std::size_t bytes) {
  Word first, last;
  __builtin_memcpy(&first, src, sizeof first);
  __builtin_memcpy(&last, src + bytes - sizeof last, sizeof last);
  __builtin_memcpy(dst, &first, sizeof first);
  __builtin_memcpy(dst + bytes - sizeof last, &last, sizeof last);
}

struct Words16 {
  std::uint64_t low, high;
};

PD_TARGET inline void copy_below_line(std::byte* dst, const std::byte* src, std::size_t bytes) {
  if (bytes >= 32) {
    struct Words32 {
      Words16 low, high;
    };
    copy_ends<Words32>(dst, src, bytes);
  } else if (bytes >= 16) {
    copy_ends<Words16>(dst, src, bytes);
  } else if (bytes >= 8) {
    copy_ends<std::uint64_t>(dst, src, bytes);
  } else if (bytes >= 4) {
    copy_ends<std::uint32_t>(dst, src, bytes);
  } else if (bytes >= 2) {
    copy_ends<std::uint16_t>(dst, src, bytes);
  } else if (bytes == 1) {
    *dst = *src;
  }
}

PD_TARGET inline void copy_line(std::byte* dst, const std::byte* src) {
  typename Vec::type part[kLine / Vec::kBytes];
  for (std::size_t i = 0; i < kLine / Vec::kBytes; ++i) part[i] = Vec::load(src + i * Vec::kBytes);
  for (std::size_t i = 0; i < kLine / Vec::kBytes; ++i) Vec::store(dst + i * Vec::kBytes, part[i]);
}

PD_TARGET inline void stream_line(std::byte* dst, const std::byte* src) {
  typename Vec::type part[kLine / Vec::kBytes];
  for (std::size_t i = 0; i < kLine / Vec::kBytes; ++i) part[i] = Vec::load(src + i * Vec::kBytes);
  for (std::size_t i = 0; i < kLine / Vec::kBytes; ++i) Vec::stream(dst + i * Vec::kBytes, part[i]);
}

PD_TARGET inline void copy_short(std::byte* dst, const std::byte* src, std::size_t bytes) {
  if (bytes < kLine) return copy_below_line(dst, src, bytes);
  const std::size_t last = bytes - kLine;
  std::size_t i = 0;
  for (; i + kLine < last; i += 2 * kLine) {
    copy_line(dst + i, src + i);
    copy_line(dst + i + kLine, src + i + kLine);
  }
  if (i < last) copy_line(dst + i, src + i);
  copy_line(dst + last, src + last);  // overlaps
}

PD_TARGET inline void prefetch_start(const std::byte* src) {
  if (src == nullptr) return;
  for (std::size_t i = 0; i < kAheadLines; ++i) Vec::prefetch(src + i * kLine);
}

PD_TARGET inline void copy_temporal_piece(std::byte* dst, const std::byte* src, std::size_t bytes) {
  if (bytes > kShortBytes) {
    std::memcpy(dst, src, bytes);
  } else {
    copy_short(dst, src, bytes);
  }
}

// `lines` lines, the destination on a line's boundary.
PD_TARGET inline void stream_lines(std::byte* dst, const std::byte* src, std::size_t lines) {
  constexpr std::size_t kUnroll = 4;
  std::size_t i = 0;
  for (; i + kUnroll <= lines; i += kUnroll) {
    for (std::size_t j = 0; j < kUnroll; ++j) Vec::prefetch(src + (i + j) * kLine + kAheadBytes);
    for (std::size_t j = 0; j < kUnroll; ++j) stream_line(dst + (i + j) * kLine, src + (i + j) * kLine);
  }
  for (; i < lines; ++i) stream_line(dst + i * kLine, src + i * kLine);
}

PD_TARGET inline bool is_line_aligned(const std::byte* dst, std::size_t bytes) {
  return ((reinterpret_cast<std::uintptr_t>(dst) | bytes) & (kLine - 1)) == 0;
}

PD_TARGET inline void stream_piece(std::byte* dst, const std::byte* src, std::size_t bytes, const std::byte* next) {
  if (bytes < kStreamBytes && !is_line_aligned(dst, bytes)) {
    prefetch_start(next);
    return copy_short(dst, src, bytes);
  }
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(dst) & (kLine - 1);
  copy_below_line(dst, src, head);
  const std::size_t lines = (bytes - head) / kLine;
  std::size_t done = head;
  if (lines > kPage / kLine) {  // all but the last page, then the next piece begins to come in
    const std::size_t before = lines - kPage / kLine;
    stream_lines(dst + done, src + done, before);
    done += before * kLine;
  }
  prefetch_start(next);
  const std::size_t rest = (bytes - done) / kLine;
  stream_lines(dst + done, src + done, rest);
  done += rest * kLine;
  copy_below_line(dst + done, src + done, bytes - done);
}

PD_TARGET void copy_row_temporal(const PieceRow& row) {
  std::byte* dst = row.dst;
  const std::byte* src = row.src;
  for (std::size_t i = 0; i < row.count; ++i) {
    prefetch_start(i + 1 < row.count ? src + row.src_stride : row.next_src);
    copy_temporal_piece(dst, src, row.bytes);
    dst += row.dst_stride;
    src += row.src_stride;
  }
}

PD_TARGET void copy_row_streaming(const PieceRow& row) {
  std::byte* dst = row.dst;
  const std::byte* src = row.src;
  for (std::size_t i = 0; i < row.count; ++i) {
    stream_piece(dst, src, row.bytes, i + 1 < row.count ? src + row.src_stride : row.next_src);
    dst += row.dst_stride;
    src += row.src_stride;
  }
}

}  // namespace
