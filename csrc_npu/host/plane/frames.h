// SPDX-License-Identifier: Apache-2.0
// A frame that comes or goes in parts, on a nonblocking socket.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "sockets.h"
#include "wire.h"

namespace pd {

enum class FrameState { kAgain, kDone, kEnd, kGone, kBad };

class FrameReader {
 public:
  FrameState advance(int fd);  // as far as what has come
  bool has_begun() const { return have_ > 0; }
  const FrameHeader& header() const { return header_; }
  std::span<const std::byte> body() const { return body_; }
  void restart();

 private:
  std::array<std::byte, kHeaderBytes> head_{};
  FrameHeader header_;
  std::vector<std::byte> body_;  // grows with what has come, never with what was announced
  std::size_t have_ = 0;         // of header and body
};

class FrameWriter {
 public:
  void start(std::vector<std::byte> bytes);
  bool is_idle() const { return sent_ == bytes_.size(); }
  FrameState advance(int fd);

 private:
  std::vector<std::byte> bytes_;
  std::size_t sent_ = 0;
};

}  // namespace pd
