// SPDX-License-Identifier: Apache-2.0
// The outgoing connections of one link. One transfer at a time; the caller's thread moves all bytes.
#pragma once

#include <atomic>
#include <chrono>
#include <span>
#include <string>
#include <vector>

#include "frames.h"
#include "pd/plane.h"
#include "pieces.h"
#include "sockets.h"

namespace pd {

// What a transfer over the connections needs; the spans must outlive the call.
struct Posting {
  Request request;                         // first_byte and num_bytes: of the whole
  std::span<const std::uint64_t> tensors;  // local base addresses, as many as the request's tensors
  std::span<const SideRun> local_runs;
  Deadline deadline;
};

// What of a posting's bytes one connection moves, and how far it is.
class Lane {
 public:
  explicit Lane(Socket socket) : socket_(std::move(socket)) {}

  void post(const Posting& posting, std::uint64_t first_byte, std::uint64_t num_bytes);
  void skip() { state_ = State::kIdle; }
  // As far as it goes without blocking. An outcome other than kOk ends the transfer.
  Outcome advance();
  bool is_done() const { return state_ == State::kIdle || state_ == State::kRefused; }
  bool is_refused() const { return state_ == State::kRefused; }
  bool is_posted() const { return writer_.is_idle(); }
  bool wants_write() const { return state_ == State::kPost || state_ == State::kSend; }
  const Reply& refusal() const { return reply_; }
  int fd() const { return socket_.fd(); }
  Socket& socket() { return socket_; }

 private:
  enum class State { kIdle, kPost, kReply, kReceive, kSend, kPlaced, kRefused };

  Outcome read_reply();
  Outcome move_data();

  Socket socket_;
  State state_ = State::kIdle;
  bool is_write_ = false;
  bool is_waiting_ = false;
  std::uint32_t sequence_ = 0;
  std::uint64_t num_bytes_ = 0;
  FrameReader reader_;
  FrameWriter writer_;
  PieceCursor cursor_;
  Reply reply_;
};

class Requester {
 public:
  Requester(const std::vector<int>& fds, std::chrono::milliseconds timeout);  // takes the descriptors

  // Whether the peer is there and silent, as it should be between transfers.
  Outcome check_peer();
  // `posted` is when the last request had been sent.
  Outcome transfer(const Posting& posting, std::chrono::steady_clock::time_point& posted);
  void say_bye();
  void cut();  // any thread; the descriptors stay open
  unsigned num_connections() const { return static_cast<unsigned>(lanes_.size()); }

 private:
  void post_all(const Posting& posting);
  Outcome move_all(Deadline deadline, std::chrono::steady_clock::time_point& posted);
  Outcome finish() const;

  std::vector<Lane> lanes_;
};

}  // namespace pd
