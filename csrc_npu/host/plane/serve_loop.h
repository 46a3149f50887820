// SPDX-License-Identifier: Apache-2.0
// One thread that serves many incoming connections.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core.h"
#include "served_connection.h"
#include "sockets.h"

namespace pd {

class ServeLoop {
 public:
  ServeLoop(PlaneCore& core, const std::string& thread_name);
  ~ServeLoop();
  ServeLoop(const ServeLoop&) = delete;
  ServeLoop& operator=(const ServeLoop&) = delete;

  // Any thread; they return before it is done. After stop() the socket is closed.
  void adopt(Socket socket, std::shared_ptr<ServedLink> link);
  void release(std::shared_ptr<ServedLink> link, bool farewell);
  void stop();  // ends all connections and joins the thread

 private:
  struct Command {
    Socket socket;  // to adopt; none: release
    std::shared_ptr<ServedLink> link;
    bool farewell = false;
  };
  struct Served {
    std::unique_ptr<ServedConnection> connection;
    Want watched = Want::kNothing;
    Deadline due = Deadline::max();  // under which it stands in deadlines_
  };

  void post(Command command);
  void run();
  void take_commands();
  void start(Command command);
  void release_now(const ServedLink* link, bool farewell);
  void update(int fd, Want want);
  void expire_overdue();
  int wait_ms() const;

  PlaneCore& core_;
  Socket epoll_;
  Socket wake_;       // eventfd
  std::mutex mutex_;  // guards commands_, stopping_
  std::vector<Command> commands_;
  bool stopping_ = false;
  std::map<int, Served> served_;  // of the loop's thread only, like deadlines_
  std::set<std::pair<Deadline, int>> deadlines_;
  std::thread thread_;
};

}  // namespace pd
