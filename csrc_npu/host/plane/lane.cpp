// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include "requester.h"

namespace pd {
namespace {

constexpr std::uint64_t kCallBytes = 4 << 20;  // of one system call
constexpr std::uint64_t kReceiveMarkBytes = 256 << 10;
constexpr std::size_t kRanges = 1024;  // IOV_MAX

Outcome to_outcome(FrameState state) {
  switch (state) {
    case FrameState::kEnd:
      return {LinkStatus::kPeerGone, 0, 0, "connection closed by the peer"};
    case FrameState::kGone:
      return {LinkStatus::kPeerGone, 0, 0, "connection lost"};
    case FrameState::kBad:
      return {LinkStatus::kBadFrame, 0, 0, "what came is no frame"};
    default:
      return {};
  }
}

}  // namespace

void Lane::post(const Posting& posting, std::uint64_t first_byte, std::uint64_t num_bytes) {
  Request request = posting.request;
  request.first_byte = first_byte;
  request.num_bytes = num_bytes;
  writer_.start(encode_request(request, ++sequence_));
  reader_.restart();
  cursor_ = PieceCursor(posting.tensors, posting.local_runs, first_byte, num_bytes);
  is_write_ = request.is_write;
  num_bytes_ = num_bytes;
  state_ = State::kPost;
}

Outcome Lane::advance() {
  is_waiting_ = false;
  while (!is_waiting_ && !is_done()) {
    Outcome outcome;
    if (state_ == State::kPost) {
      const FrameState sent = writer_.advance(fd());
      if (sent == FrameState::kDone) {
        state_ = State::kReply;
      } else {
        outcome = to_outcome(sent);
      }
      is_waiting_ = true;  // an answer takes a while in any case
    } else if (state_ == State::kReply || state_ == State::kPlaced) {
      outcome = read_reply();
    } else {
      outcome = move_data();
    }
    if (outcome.status != LinkStatus::kOk) {
      return outcome;
    }
  }
  return {};
}

Outcome Lane::read_reply() {
  const FrameState state = reader_.advance(fd());
  if (state == FrameState::kAgain) {
    is_waiting_ = true;
    return {};
  }
  if (state != FrameState::kDone) {
    return to_outcome(state);
  }
  const FrameHeader header = reader_.header();
  if (header.kind == FrameKind::kBye) {
    return {LinkStatus::kPeerUnlinked, 0, 0, "the peer has torn the link down"};
  }
  const std::optional<Reply> reply =
      header.kind == FrameKind::kReply && header.sequence == sequence_ ? decode_reply(reader_.body()) : std::nullopt;
  reader_.restart();
  if (!reply || (reply->status == kStatusOk && reply->num_bytes != num_bytes_)) {
    return {LinkStatus::kBadFrame, 0, 0, "what came is no answer to the request"};
  }
  if (reply->status != kStatusOk) {
    reply_ = *reply;
    state_ = State::kRefused;
  } else if (state_ == State::kPlaced) {
    state_ = State::kIdle;
  } else if (is_write_) {
    state_ = State::kSend;
  } else {
    state_ = State::kReceive;
    set_receive_mark(fd(), std::min(num_bytes_, kReceiveMarkBytes));
  }
  return {};
}

Outcome Lane::move_data() {
  std::array<iovec, kRanges> ranges;
  const std::size_t count = cursor_.peek(ranges, kCallBytes);
  const std::span<const iovec> some(ranges.data(), count);
  const IoResult result = is_write_ ? send(fd(), some) : receive(fd(), some);
  switch (result.state) {
    case IoState::kMoved:
      break;
    case IoState::kAgain:
      is_waiting_ = true;
      return {};
    case IoState::kFault:
      return {LinkStatus::kLocalFault, 0, 0, "local memory is not there: " + error_text(result.error)};
    case IoState::kEnd:
      return to_outcome(FrameState::kEnd);
    case IoState::kGone:
      return {LinkStatus::kPeerGone, 0, 0, "connection lost: " + error_text(result.error)};
  }
  cursor_.advance(result.bytes);
  const std::uint64_t left = cursor_.remaining();
  if (left > 0) {
    if (!is_write_ && left < kReceiveMarkBytes) {
      set_receive_mark(fd(), left);
    }
    return {};
  }
  if (!is_write_) {
    set_receive_mark(fd(), 1);
  }
  state_ = is_write_ ? State::kPlaced : State::kIdle;
  return {};
}

}  // namespace pd
