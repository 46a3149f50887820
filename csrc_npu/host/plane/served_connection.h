// SPDX-License-Identifier: Apache-2.0
// One incoming connection of a link, as a state machine that never blocks. Belongs to one loop's thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core.h"
#include "frames.h"
#include "pieces.h"

namespace pd {

enum class Want { kRead, kWrite, kNothing };  // kNothing: the connection has ended

class ServedConnection {
 public:
  ServedConnection(Socket socket, std::shared_ptr<ServedLink> link, PlaneCore& core);
  ~ServedConnection();
  ServedConnection(const ServedConnection&) = delete;
  ServedConnection& operator=(const ServedConnection&) = delete;

  int fd() const { return socket_.fd(); }
  const std::shared_ptr<ServedLink>& link() const { return link_; }
  Deadline deadline() const { return deadline_; }  // of the transfer that runs; max() between transfers

  Want advance();                                // as far as what has come, or one visit's share
  Want say_farewell();                           // now, or after the transfer that runs
  void expire();                                 // the deadline has passed
  bool is_broken() const { return is_broken_; }  // by the peer: its whole link must go

 private:
  enum class State { kRequest, kReply, kSend, kReceive, kEnded };

  State read_request();
  State accept(Request request);
  std::string open(std::uint32_t& status);
  State reply(const Reply& reply, State next);
  State write_reply();
  State move_data(std::uint64_t& budget);
  State finish_transfer();
  State end(LinkEvent kind, const std::string& text);
  State end_gone(FrameState state);
  Want want() const;

  Socket socket_;
  const std::shared_ptr<ServedLink> link_;
  PlaneCore& core_;
  State state_ = State::kRequest;
  State after_reply_ = State::kRequest;
  Deadline deadline_ = Deadline::max();
  FrameReader reader_;
  FrameWriter writer_;
  std::uint32_t sequence_ = 0;
  Request request_;          // the cursor looks into it
  ServedCaches::Use cache_;  // while its memory is touched
  PieceCursor cursor_;
  bool is_waiting_ = false;  // the socket can give or take no more now
  bool is_closing_ = false;  // say farewell when the transfer has ended
  bool is_broken_ = false;
};

}  // namespace pd
