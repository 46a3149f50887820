// SPDX-License-Identifier: Apache-2.0
#include "serve_loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

namespace pd {
namespace {

constexpr int kEvents = 64;

std::uint32_t to_epoll(Want want) { return want == Want::kWrite ? EPOLLOUT : EPOLLIN; }

}  // namespace

ServeLoop::ServeLoop(PlaneCore& core, const std::string& thread_name)
    : core_(core), epoll_(::epoll_create1(EPOLL_CLOEXEC)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = wake_.fd();
  if (!epoll_ || !wake_ || ::epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, wake_.fd(), &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "no descriptors for a serving thread");
  }
  thread_ = std::thread([this, thread_name] {
    pthread_setname_np(pthread_self(), thread_name.c_str());
    run();
  });
}

ServeLoop::~ServeLoop() { stop(); }

void ServeLoop::adopt(Socket socket, std::shared_ptr<ServedLink> link) {
  link->connection_began();
  ++core_.counters.connections;  // from here on, not from when its thread has time
  post({std::move(socket), std::move(link), false});
}

void ServeLoop::release(std::shared_ptr<ServedLink> link, bool farewell) {
  post({Socket(), std::move(link), farewell});
}

void ServeLoop::post(Command command) {
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_) {
      commands_.push_back(std::move(command));
    } else if (command.socket) {
      --core_.counters.connections;
      command.link->connection_ended();
    }
  }
  const std::uint64_t one = 1;
  (void)!::write(wake_.fd(), &one, sizeof(one));
}

void ServeLoop::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  const std::uint64_t one = 1;
  (void)!::write(wake_.fd(), &one, sizeof(one));
  if (thread_.joinable()) {
    thread_.join();
  }
}

void ServeLoop::run() {
  std::array<epoll_event, kEvents> events;
  while (true) {
    const int count = ::epoll_wait(epoll_.fd(), events.data(), kEvents, wait_ms());
    for (int i = 0; i < std::max(count, 0); ++i) {
      const int fd = events[static_cast<std::size_t>(i)].data.fd;
      if (fd == wake_.fd()) {
        std::uint64_t ignored = 0;
        (void)!::read(fd, &ignored, sizeof(ignored));
      } else if (const auto found = served_.find(fd); found != served_.end()) {
        update(fd, found->second.connection->advance());
      }
    }
    expire_overdue();
    take_commands();
    const std::lock_guard lock(mutex_);
    if (stopping_ && commands_.empty()) {
      break;
    }
  }
  deadlines_.clear();
  served_.clear();
}

int ServeLoop::wait_ms() const {
  if (deadlines_.empty()) {
    return -1;
  }
  const auto left = deadlines_.begin()->first - std::chrono::steady_clock::now();
  const auto whole = std::chrono::ceil<std::chrono::milliseconds>(left).count();
  return static_cast<int>(std::clamp<std::int64_t>(whole, 0, 60'000));
}

void ServeLoop::take_commands() {
  std::vector<Command> commands;
  {
    const std::lock_guard lock(mutex_);
    commands.swap(commands_);
  }
  for (Command& command : commands) {
    if (command.socket) {
      start(std::move(command));
    } else {
      release_now(command.link.get(), command.farewell);
    }
  }
}

void ServeLoop::start(Command command) {
  const int fd = command.socket.fd();
  auto connection = std::make_unique<ServedConnection>(std::move(command.socket), std::move(command.link), core_);
  epoll_event event{};
  event.events = to_epoll(Want::kRead);
  event.data.fd = fd;
  if (::epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return;  // out of memory for watches: the peer sees the end of the connection
  }
  served_[fd] = {std::move(connection), Want::kRead, Deadline::max()};
}

void ServeLoop::release_now(const ServedLink* link, bool farewell) {
  std::vector<int> fds;
  for (const auto& [fd, served] : served_) {
    if (served.connection->link().get() == link) {
      fds.push_back(fd);
    }
  }
  for (const int fd : fds) {
    update(fd, farewell ? served_[fd].connection->say_farewell() : Want::kNothing);
  }
}

void ServeLoop::update(int fd, Want want) {
  Served& served = served_[fd];
  const Deadline due = want == Want::kNothing ? Deadline::max() : served.connection->deadline();
  if (due != served.due) {
    deadlines_.erase({served.due, fd});
    served.due = due;
    if (due != Deadline::max()) {
      deadlines_.insert({due, fd});
    }
  }
  if (want == Want::kNothing) {
    const std::shared_ptr<ServedLink> broken = served.connection->is_broken() ? served.connection->link() : nullptr;
    served_.erase(fd);  // closes it, which also ends the watch
    if (broken) {
      core_.release(broken, false);
    }
  } else if (want != served.watched) {
    epoll_event event{};
    event.events = to_epoll(want);
    event.data.fd = fd;
    ::epoll_ctl(epoll_.fd(), EPOLL_CTL_MOD, fd, &event);
    served.watched = want;
  }
}

void ServeLoop::expire_overdue() {
  const Deadline now = std::chrono::steady_clock::now();
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const int fd = deadlines_.begin()->second;
    served_[fd].connection->expire();
    update(fd, Want::kNothing);
  }
}

}  // namespace pd
