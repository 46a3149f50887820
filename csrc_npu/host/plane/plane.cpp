// SPDX-License-Identifier: Apache-2.0
#include "pd/plane.h"

#include <sys/socket.h>

#include <stdexcept>
#include <utility>

#include "core.h"
#include "serve_loop.h"

namespace pd {
namespace {

std::vector<Socket> take(const std::vector<int>& fds) {
  std::vector<Socket> sockets;
  sockets.reserve(fds.size());
  for (const int fd : fds) {
    sockets.emplace_back(fd);
  }
  return sockets;
}

}  // namespace

Plane::Plane(unsigned num_threads, std::chrono::milliseconds transfer_timeout, std::shared_ptr<CopyPool> copy_pool)
    : core_(std::make_shared<PlaneCore>(transfer_timeout)) {
  if (num_threads == 0 || num_threads > 64 || transfer_timeout.count() <= 0) {
    throw std::invalid_argument("a plane has 1..64 threads and a positive timeout, not " + std::to_string(num_threads) +
                                " and " + std::to_string(transfer_timeout.count()) + " ms");
  }
  core_->copy_pool = std::move(copy_pool);
  for (unsigned i = 0; i < num_threads; ++i) {
    core_->loops.push_back(std::make_unique<ServeLoop>(*core_, "pd-plane-" + std::to_string(i)));
  }
}

Plane::~Plane() {
  for (const std::unique_ptr<ServeLoop>& loop : core_->loops) {
    loop->stop();
  }
  core_->events.wake();
}

void Plane::add_cache(LocalCache cache) { core_->caches.add(std::move(cache)); }

bool Plane::remove_cache(std::int64_t id, Deadline deadline) { return core_->caches.remove(id, deadline); }

std::shared_ptr<Link> Plane::open_link(const std::vector<int>& request_fds, const std::vector<int>& serve_fds,
                                       std::int64_t last_local_cache) {
  std::vector<Socket> request = take(request_fds);
  std::vector<Socket> serve = take(serve_fds);
  const auto is_sane = [](const std::vector<Socket>& sockets) {
    return !sockets.empty() && sockets.size() <= kMaxConnections;
  };
  if (!is_sane(request) || !is_sane(serve)) {
    throw std::invalid_argument("a link has 1.." + std::to_string(kMaxConnections) + " connections each way, not " +
                                std::to_string(request.size()) + " and " + std::to_string(serve.size()));
  }
  for (const Socket& socket : serve) {
    configure_socket(socket.fd(), core_->timeout);
  }
  auto served = std::make_shared<ServedLink>(core_->next_link++, last_local_cache);
  std::vector<int> fds;
  fds.reserve(request.size());
  for (Socket& socket : request) {
    fds.push_back(socket.release());
  }
  auto link = std::make_shared<Link>(core_, served, fds);
  for (Socket& socket : serve) {
    core_->loops[core_->next_loop++ % core_->loops.size()]->adopt(std::move(socket), served);
  }
  return link;
}

std::optional<Event> Plane::wait_event(Deadline deadline) { return core_->events.wait(deadline); }

void Plane::wake_waiters() { core_->events.wake(); }

PlaneStats Plane::stats() const {
  const PlaneCounters& counters = core_->counters;
  return {counters.connections, counters.requests,   counters.refused,
          counters.bytes,       counters.bad_frames, counters.stalled};
}

}  // namespace pd
