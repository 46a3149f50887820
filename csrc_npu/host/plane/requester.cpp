// SPDX-License-Identifier: Apache-2.0
#include "requester.h"

#include <poll.h>

#include <algorithm>
#include <array>

namespace pd {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kMinLaneBytes = 256 << 10;  // less is not worth another connection
constexpr std::uint64_t kLaneAlignment = 4096;
constexpr auto kFarewellTime = std::chrono::milliseconds(200);

int left_ms(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
}

}  // namespace

Requester::Requester(const std::vector<int>& fds, std::chrono::milliseconds timeout) {
  for (const int fd : fds) {
    lanes_.emplace_back(Socket(fd));
  }
  for (const Lane& lane : lanes_) {
    configure_socket(lane.fd(), timeout);
  }
}

Outcome Requester::check_peer() {
  for (const Lane& lane : lanes_) {
    const IoResult result = peek(lane.fd());
    if (result.state == IoState::kAgain) {
      continue;
    }
    if (result.state != IoState::kMoved) {
      return {LinkStatus::kPeerGone, 0, 0, "connection closed by the peer"};
    }
    FrameReader reader;  // words of farewell, or something that is not of this protocol
    const Deadline deadline = Clock::now() + kFarewellTime;
    FrameState state = FrameState::kAgain;
    while ((state = reader.advance(lane.fd())) == FrameState::kAgain && Clock::now() < deadline) {
      pollfd watch{lane.fd(), POLLIN, 0};
      (void)::poll(&watch, 1, left_ms(deadline));
    }
    if (state == FrameState::kDone && reader.header().kind == FrameKind::kBye) {
      return {LinkStatus::kPeerUnlinked, 0, 0, "the peer has torn the link down"};
    }
    return {LinkStatus::kBadFrame, 0, 0, "the peer spoke unasked"};
  }
  return {};
}

Outcome Requester::transfer(const Posting& posting, Clock::time_point& posted) {
  post_all(posting);
  Outcome outcome = move_all(posting.deadline, posted);
  return outcome.status == LinkStatus::kOk ? finish() : outcome;
}

void Requester::post_all(const Posting& posting) {
  const std::uint64_t total = posting.request.num_bytes;
  const std::uint64_t used = std::clamp<std::uint64_t>(total / kMinLaneBytes, 1, lanes_.size());
  std::uint64_t first = 0;
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    if (i >= used) {
      lanes_[i].skip();
      continue;
    }
    const std::uint64_t stop = i + 1 == used ? total : total / used * (i + 1) / kLaneAlignment * kLaneAlignment;
    lanes_[i].post(posting, first, stop - first);
    first = stop;
  }
}

Outcome Requester::move_all(Deadline deadline, Clock::time_point& posted) {
  std::array<pollfd, kMaxConnections> watches;
  std::array<Lane*, kMaxConnections> watched;
  bool is_posted = false;
  for (Lane& lane : lanes_) {
    if (Outcome outcome = lane.advance(); outcome.status != LinkStatus::kOk) {
      return outcome;
    }
  }
  while (true) {
    if (!is_posted && std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.is_posted(); })) {
      is_posted = true;
      posted = Clock::now();
    }
    nfds_t count = 0;
    for (Lane& lane : lanes_) {
      if (!lane.is_done()) {
        watched[count] = &lane;
        watches[count++] = {lane.fd(), static_cast<short>(lane.wants_write() ? POLLOUT : POLLIN), 0};
      }
    }
    if (count == 0) {
      return {};
    }
    if (Clock::now() >= deadline) {
      return {LinkStatus::kTimeout, 0, 0, "deadline passed while bytes were under way"};
    }
    if (::poll(watches.data(), count, left_ms(deadline)) <= 0) {
      continue;
    }
    for (nfds_t i = 0; i < count; ++i) {
      if (watches[i].revents == 0) {
        continue;
      }
      if (Outcome outcome = watched[i]->advance(); outcome.status != LinkStatus::kOk) {
        return outcome;
      }
    }
  }
}

Outcome Requester::finish() const {
  const auto refused = std::find_if(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.is_refused(); });
  if (refused == lanes_.end()) {
    return {};
  }
  return {LinkStatus::kRefused, refused->refusal().status, 0, refused->refusal().reason};
}

void Requester::say_bye() {
  const std::vector<std::byte> bytes = encode_bye();
  for (const Lane& lane : lanes_) {
    FrameWriter writer;
    writer.start(bytes);
    (void)writer.advance(lane.fd());  // a peer that is gone needs no farewell
  }
}

void Requester::cut() {
  for (const Lane& lane : lanes_) {
    cut_socket(lane.fd());
  }
}

}  // namespace pd
