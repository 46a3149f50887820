// SPDX-License-Identifier: Apache-2.0
// One plain TCP stream: the limit of anything that goes over one socket.
#include <sys/socket.h>
#include <sys/types.h>

#include <algorithm>
#include <cerrno>

#include "bench_api.h"

int pd_bench_send(int fd, std::uint64_t address, std::uint64_t bytes, std::uint64_t chunk) {
  const auto* from = reinterpret_cast<const char*>(address);
  for (std::uint64_t done = 0; done < bytes;) {
    const ssize_t sent = ::send(fd, from + done, std::min(chunk, bytes - done), MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    done += static_cast<std::uint64_t>(sent);
  }
  return 0;
}

int pd_bench_receive(int fd, std::uint64_t address, std::uint64_t bytes, std::uint64_t chunk) {
  auto* to = reinterpret_cast<char*>(address);
  for (std::uint64_t done = 0; done < bytes;) {
    const ssize_t received = ::recv(fd, to + done, std::min(chunk, bytes - done), 0);
    if (received < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    if (received == 0) return -1;
    done += static_cast<std::uint64_t>(received);
  }
  return 0;
}
