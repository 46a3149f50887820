// SPDX-License-Identifier: Apache-2.0
#include "frames.h"

#include <algorithm>

namespace pd {
namespace {

constexpr std::size_t kGrowBytes = 64 << 10;

FrameState to_frame_state(const IoResult& result) {
  switch (result.state) {
    case IoState::kAgain:
      return FrameState::kAgain;
    case IoState::kEnd:
      return FrameState::kEnd;
    default:
      return FrameState::kGone;
  }
}

}  // namespace

FrameState FrameReader::advance(int fd) {
  while (true) {
    if (have_ >= kHeaderBytes && have_ == kHeaderBytes + header_.body_bytes) {
      return FrameState::kDone;
    }
    std::span<std::byte> room;
    if (have_ < kHeaderBytes) {
      room = std::span(head_).subspan(have_);
    } else {
      const std::size_t done = have_ - kHeaderBytes;
      body_.resize(std::min<std::size_t>(header_.body_bytes, done + kGrowBytes));
      room = std::span(body_).subspan(done);
    }
    const iovec range{room.data(), room.size()};
    const IoResult result = receive(fd, std::span(&range, 1));
    if (result.state != IoState::kMoved) {
      return to_frame_state(result);
    }
    const bool had_header = have_ >= kHeaderBytes;
    have_ += result.bytes;
    if (!had_header && have_ == kHeaderBytes) {
      const std::optional<FrameHeader> header = decode_header(head_);
      if (!header) {
        return FrameState::kBad;
      }
      header_ = *header;
    }
  }
}

void FrameReader::restart() {
  have_ = 0;
  body_.clear();
  if (body_.capacity() > kGrowBytes) {
    body_.shrink_to_fit();  // an idle connection costs nothing
  }
}

void FrameWriter::start(std::vector<std::byte> bytes) {
  bytes_ = std::move(bytes);
  sent_ = 0;
}

FrameState FrameWriter::advance(int fd) {
  while (!is_idle()) {
    const iovec range{bytes_.data() + sent_, bytes_.size() - sent_};
    const IoResult result = send(fd, std::span(&range, 1));
    if (result.state != IoState::kMoved) {
      return to_frame_state(result);
    }
    sent_ += result.bytes;
  }
  bytes_ = {};
  sent_ = 0;
  return FrameState::kDone;
}

}  // namespace pd
