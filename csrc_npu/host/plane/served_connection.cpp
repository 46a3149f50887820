// SPDX-License-Identifier: Apache-2.0
#include "served_connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <span>

namespace pd {
namespace {

constexpr std::uint64_t kVisitBytes = 4 << 20;  // then the loop looks after its other connections
constexpr std::uint64_t kCallBytes = 1 << 20;   // of one system call
constexpr std::uint64_t kReceiveMarkBytes = 256 << 10;
constexpr std::size_t kRanges = 1024;  // IOV_MAX

}  // namespace

ServedConnection::ServedConnection(Socket socket, std::shared_ptr<ServedLink> link, PlaneCore& core)
    : socket_(std::move(socket)), link_(std::move(link)), core_(core) {}

ServedConnection::~ServedConnection() {
  --core_.counters.connections;
  cache_.reset();
  cut_socket(socket_.fd());
  socket_.close();
  link_->connection_ended();
}

Want ServedConnection::want() const {
  switch (state_) {
    case State::kRequest:
    case State::kReceive:
      return Want::kRead;
    case State::kReply:
    case State::kSend:
      return Want::kWrite;
    case State::kEnded:
      break;
  }
  return Want::kNothing;
}

Want ServedConnection::advance() {
  std::uint64_t budget = kVisitBytes;
  is_waiting_ = false;
  while (!is_waiting_ && budget > 0 && state_ != State::kEnded) {
    switch (state_) {
      case State::kRequest:
        state_ = read_request();
        break;
      case State::kReply:
        state_ = write_reply();
        break;
      case State::kSend:
      case State::kReceive:
        state_ = move_data(budget);
        break;
      case State::kEnded:
        break;
    }
  }
  return want();
}

ServedConnection::State ServedConnection::read_request() {
  const FrameState state = reader_.advance(fd());
  if (reader_.has_begun() && deadline_ == Deadline::max()) {
    deadline_ = std::chrono::steady_clock::now() + core_.timeout;
  }
  if (state == FrameState::kAgain) {
    is_waiting_ = true;
    return State::kRequest;
  }
  if (state == FrameState::kBad) {
    return end(LinkEvent::kBroken, "the peer sent what is no frame");
  }
  if (state != FrameState::kDone) {
    return end_gone(state);
  }
  const FrameHeader header = reader_.header();
  if (header.kind == FrameKind::kBye) {
    return end(LinkEvent::kFarewell, "the peer has torn the link down");
  }
  std::optional<Request> request;
  if (header.kind == FrameKind::kRead || header.kind == FrameKind::kWrite) {
    request = decode_request(header, reader_.body());
  }
  reader_.restart();
  if (!request) {
    return end(LinkEvent::kBroken, "the peer sent a frame that is no request");
  }
  sequence_ = header.sequence;
  ++core_.counters.requests;
  return accept(std::move(*request));
}

ServedConnection::State ServedConnection::accept(Request request) {
  request_ = std::move(request);
  std::uint32_t status = kStatusOk;
  std::string why = open(status);
  if (status != kStatusOk) {
    ++core_.counters.refused;
    cache_.reset();
    return reply({0, status, std::move(why)}, State::kRequest);
  }
  const std::span<const std::uint64_t> tensors =
      std::span(cache_->tensors).subspan(request_.tensor_start, request_.tensor_stop - request_.tensor_start);
  cursor_ = PieceCursor(tensors, request_.runs, request_.first_byte, request_.num_bytes);
  return reply({request_.num_bytes, kStatusOk, {}}, request_.is_write ? State::kReceive : State::kSend);
}

// The peer has proved the secret but may be confused: only our own table counts.
std::string ServedConnection::open(std::uint32_t& status) {
  const std::string name = "cache_id " + std::to_string(request_.cache_id);
  status = kStatusNoCache;
  if (request_.cache_id <= 0 || request_.cache_id > link_->last_cache_id()) {
    return name + " is younger than the link";
  }
  cache_ = core_.caches.use(request_.cache_id);
  if (!cache_) {
    return "no local cache has " + name;
  }
  status = kStatusInvalid;
  if (!cache_->accessible) {
    return name + " is not remote_accessible";
  }
  std::string why = check_request(request_, cache_->tensors.size(), cache_->tensor_bytes);
  if (why.empty()) {
    status = kStatusOk;
  }
  return why;
}

ServedConnection::State ServedConnection::reply(const Reply& reply, State next) {
  writer_.start(encode_reply(reply, sequence_));
  after_reply_ = next;
  return State::kReply;
}

ServedConnection::State ServedConnection::write_reply() {
  const FrameState state = writer_.advance(fd());
  if (state == FrameState::kAgain) {
    is_waiting_ = true;
    return State::kReply;
  }
  if (state != FrameState::kDone) {
    return end_gone(state);
  }
  if (after_reply_ == State::kRequest) {
    return finish_transfer();
  }
  if (after_reply_ == State::kReceive) {
    set_receive_mark(fd(), std::min(cursor_.remaining(), kReceiveMarkBytes));
  }
  return after_reply_;
}

ServedConnection::State ServedConnection::move_data(std::uint64_t& budget) {
  const bool is_send = state_ == State::kSend;
  std::array<iovec, kRanges> ranges;
  const std::size_t count = cursor_.peek(ranges, std::min(budget, kCallBytes));
  const std::span<const iovec> some(ranges.data(), count);
  const IoResult result = is_send ? send(fd(), some) : receive(fd(), some);
  switch (result.state) {
    case IoState::kMoved:
      break;
    case IoState::kAgain:
      is_waiting_ = true;
      return state_;
    case IoState::kFault:
      return end(LinkEvent::kBroken, "registered memory is not there: " + error_text(result.error));
    case IoState::kEnd:
    case IoState::kGone:
      return end(LinkEvent::kVanished, "the peer vanished in the middle of a transfer");
  }
  cursor_.advance(result.bytes);
  budget -= result.bytes;
  core_.counters.bytes += result.bytes;
  if (cursor_.remaining() > 0) {
    if (!is_send && cursor_.remaining() < kReceiveMarkBytes) {
      set_receive_mark(fd(), cursor_.remaining());
    }
    return state_;
  }
  cache_.reset();
  if (is_send) {
    return finish_transfer();
  }
  set_receive_mark(fd(), 1);
  return reply({request_.num_bytes, kStatusOk, {}}, State::kRequest);
}

ServedConnection::State ServedConnection::finish_transfer() {
  deadline_ = Deadline::max();
  request_ = {};
  if (is_closing_) {
    say_farewell();
    return state_;
  }
  return State::kRequest;
}

Want ServedConnection::say_farewell() {
  const bool is_idle = deadline_ == Deadline::max() && !reader_.has_begun();
  if (!is_idle) {
    is_closing_ = true;
    return want();
  }
  writer_.start(encode_bye());
  (void)writer_.advance(fd());  // into an empty buffer; a peer that is gone needs none
  state_ = State::kEnded;
  return Want::kNothing;
}

void ServedConnection::expire() {
  ++core_.counters.stalled;
  state_ = end(LinkEvent::kBroken, "the peer stopped in the middle of a transfer");
}

ServedConnection::State ServedConnection::end_gone(FrameState state) {
  return end(LinkEvent::kVanished, state == FrameState::kEnd ? "the peer closed the connection" : "the peer is gone");
}

ServedConnection::State ServedConnection::end(LinkEvent kind, const std::string& text) {
  if (kind == LinkEvent::kBroken) {
    is_broken_ = true;
    ++core_.counters.bad_frames;
  }
  if (link_->claim_event()) {
    core_.events.push({link_->id(), kind, text});
  }
  cache_.reset();
  return State::kEnded;
}

}  // namespace pd
