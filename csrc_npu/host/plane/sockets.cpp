// SPDX-License-Identifier: Apache-2.0
#include "sockets.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <system_error>

namespace pd {
namespace {

constexpr int kKeepIdleSeconds = 10;  // a dead host is noticed within half a minute, also on an idle link
constexpr int kKeepIntervalSeconds = 5;
constexpr int kKeepCount = 3;

IoResult to_result(ssize_t moved, bool is_receive) {
  if (moved > 0) {
    return {IoState::kMoved, static_cast<std::uint64_t>(moved), 0};
  }
  if (moved == 0) {
    return {is_receive ? IoState::kEnd : IoState::kAgain, 0, 0};
  }
  const int error = errno;
  if (error == EAGAIN || error == EWOULDBLOCK || error == EINTR) {
    return {IoState::kAgain, 0, 0};
  }
  return {error == EFAULT ? IoState::kFault : IoState::kGone, 0, error};
}

msghdr to_message(std::span<const iovec> ranges) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(ranges.data());  // the call only reads them
  message.msg_iovlen = std::min<std::size_t>(ranges.size(), IOV_MAX);
  return message;
}

void set_option(int fd, int level, int name, int value) {
  // Refused where the socket is not TCP, which then needs none of it.
  (void)::setsockopt(fd, level, name, &value, sizeof(value));
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.release();
  }
  return *this;
}

void Socket::close() {
  if (fd_ >= 0) {
    ::close(release());
  }
}

IoResult receive(int fd, std::span<const iovec> into) {
  msghdr message = to_message(into);
  return to_result(::recvmsg(fd, &message, MSG_DONTWAIT), true);
}

IoResult send(int fd, std::span<const iovec> from) {
  const msghdr message = to_message(from);
  return to_result(::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL), false);
}

IoResult peek(int fd) {
  char byte = 0;
  return to_result(::recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT), true);
}

void configure_socket(int fd, std::chrono::milliseconds timeout) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    throw std::system_error(errno, std::generic_category(), "not a socket");
  }
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdleSeconds);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepIntervalSeconds);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepCount);
  const auto limit = std::clamp<std::int64_t>(timeout.count(), 1, INT_MAX);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(limit));
}

void set_receive_mark(int fd, std::uint64_t bytes) {
  set_option(fd, SOL_SOCKET, SO_RCVLOWAT, static_cast<int>(std::min<std::uint64_t>(bytes, INT_MAX)));
}

void cut_socket(int fd) { (void)::shutdown(fd, SHUT_RDWR); }

std::string error_text(int error) { return std::generic_category().message(error); }

}  // namespace pd
