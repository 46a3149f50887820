// SPDX-License-Identifier: Apache-2.0
// Stream sockets in nonblocking mode: vectored reads and writes that never block and never raise a signal.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace pd {

// Owns a descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : fd_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept;
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void close();

 private:
  int fd_ = -1;
};

enum class IoState { kMoved, kAgain, kEnd, kGone, kFault };  // kFault: our memory is not there

struct IoResult {
  IoState state = IoState::kAgain;
  std::uint64_t bytes = 0;  // with kMoved, > 0
  int error = 0;            // errno with kGone and kFault
};

IoResult receive(int fd, std::span<const iovec> into);
IoResult send(int fd, std::span<const iovec> from);
// Looks at the next byte without taking it: kMoved, kAgain (nothing there), kEnd or kGone.
IoResult peek(int fd);

// Nonblocking; over TCP also no delay, keepalive, and unacknowledged data for at most `timeout`.
void configure_socket(int fd, std::chrono::milliseconds timeout);
// Wake a reader only once that many bytes are there (or the end).
void set_receive_mark(int fd, std::uint64_t bytes);
void cut_socket(int fd);

std::string error_text(int error);

}  // namespace pd
