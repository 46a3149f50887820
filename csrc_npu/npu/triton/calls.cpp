// SPDX-License-Identifier: Apache-2.0
// What a rewritten kernel calls: the operations that are hardware on an NPU. Names and signatures are the compiler's;
// arguments that only tune the hardware (padding, cache hints) are not looked at.
#include <cstdint>
#include <cstring>
#include <limits>

#include "core.h"

namespace {

using pd::npu_sim::Core;
using pd::npu_sim::get_core;
using pd::npu_sim::Pipe;
using pd::npu_sim::Vector;

constexpr std::int64_t kWord = 4;

// A memref of rank 2 as MLIR passes it.
struct Matrix {
  void* allocated;
  void* aligned;
  std::int64_t offset;
  std::int64_t sizes[2];
  std::int64_t strides[2];
};

// One side of a transfer: `lines` of `words` each, `pitch` words apart.
struct Area {
  std::uint8_t* start;
  std::int64_t lines;
  std::int64_t words;
  std::int64_t pitch;

  [[nodiscard]] std::size_t bytes() const { return static_cast<std::size_t>(lines * words * kWord); }
  [[nodiscard]] std::uint8_t* line(std::int64_t number) const { return start + number * pitch * kWord; }
};

Area make_area(const Vector& vector) {
  return {static_cast<std::uint8_t*>(vector.aligned) + vector.offset * kWord, 1, vector.size, vector.size};
}

Area make_area(const Matrix& matrix) {
  auto* const start = static_cast<std::uint8_t*>(matrix.aligned) + matrix.offset * kWord;
  return {start, matrix.sizes[0], matrix.sizes[1], matrix.strides[0]};
}

bool check_area(Core& core, const Area& area) {
  bool inside = true;
  for (std::int64_t i = 0; i < area.lines; ++i) {
    inside = core.check_buffer(area.line(i), static_cast<std::size_t>(area.words * kWord)) && inside;
  }
  return inside;
}

// Posts a copy to a pipe; the addresses are taken now, the bytes when the pipe comes to it.
void post_copy(Core& core, pd::npu_sim::PipeId id, const Area& source, const Area& target) {
  Pipe* const pipe = core.find_pipe(id);
  pipe->push([pipe, source, target] {
    pipe->linger();
    for (std::int64_t i = 0; i < source.lines; ++i) {
      std::memcpy(target.line(i), source.line(i), static_cast<std::size_t>(source.words * kWord));
    }
  });
}

void load(const Area& source, const Area& target) {
  Core& core = get_core();
  core.count_load(target.bytes());
  if (check_area(core, target)) post_copy(core, pd::npu_sim::kLoad, source, target);
}

void store(const Area& source, const Area& target) {
  Core& core = get_core();
  core.count_store(source.bytes());
  if (check_area(core, source)) post_copy(core, pd::npu_sim::kStore, source, target);
}

Vector make_rest(std::uint8_t* start, std::int64_t words) { return {start, start, 0, words, 1}; }

}  // namespace

extern "C" {

std::int64_t _mlir_ciface_pd_sim_program() { return get_core().program(); }

void _mlir_ciface_pd_sim_buffer_i32(Vector* out, std::int64_t at) {
  *out = make_rest(get_core().buffer() + at, (static_cast<std::int64_t>(pd::npu_sim::kBufferBytes) - at) / kWord);
}

void _mlir_ciface_pd_sim_global_i32(Vector* out, std::int64_t address) {
  *out = make_rest(reinterpret_cast<std::uint8_t*>(address), std::numeric_limits<std::int64_t>::max() / kWord);
}

void _mlir_ciface_pd_sim_set_flag(std::int64_t source, std::int64_t target, std::int64_t event) {
  get_core().set_flag(source, target, event);
}

void _mlir_ciface_pd_sim_wait_flag(std::int64_t source, std::int64_t target, std::int64_t event) {
  get_core().wait_flag(source, target, event);
}

// A barrier within one pipe is its order here.
void _mlir_ciface_pd_sim_barrier(std::int64_t pipe) {
  if (pipe == pd::npu_sim::kAllPipes) get_core().drain();
}

void _mlir_ciface_load_gm_to_ubuf_1d_int32_t(Vector* source, Vector* target, std::int32_t, std::int32_t, std::int64_t) {
  load(make_area(*source), make_area(*target));
}

void _mlir_ciface_load_gm_to_ubuf_2d_int32_t(Matrix* source, Matrix* target, std::int32_t, std::int32_t, std::int64_t) {
  load(make_area(*source), make_area(*target));
}

void _mlir_ciface_store_ubuf_to_gm_1d_int32_t(Vector* source, Vector* target, std::int32_t) {
  store(make_area(*source), make_area(*target));
}

void _mlir_ciface_store_ubuf_to_gm_2d_int32_t(Matrix* source, Matrix* target, std::int32_t) {
  store(make_area(*source), make_area(*target));
}

}  // extern "C"
