// SPDX-License-Identifier: Apache-2.0
// Streams and events of the stand-in.
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "standin.h"

namespace standin {
namespace {

std::atomic<long> counters[kNumCounters];

struct Event {
  std::mutex mutex;
  std::shared_ptr<Mark> last;

  std::shared_ptr<Mark> latest() {
    const std::lock_guard lock(mutex);
    return last;
  }
};

// All streams, so that a device can be waited for. Leaked on purpose: torch_npu uses streams while the process exits.
struct Registry {
  std::mutex mutex;
  std::map<Stream*, std::unique_ptr<Stream>> streams;
  std::int32_t next_id = 0;
  Stream* default_stream = nullptr;

  Stream* create() {
    const std::lock_guard lock(mutex);
    auto made = std::make_unique<Stream>(next_id++);
    Stream* stream = made.get();
    streams.emplace(stream, std::move(made));
    return stream;
  }
};

Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

Event* as_event(aclrtEvent event) { return static_cast<Event*>(event); }

aclError wait_for_event(aclrtEvent event) {
  count(kHostSyncs);
  if (const auto mark = as_event(event)->latest()) mark->wait();
  return kOk;
}

aclError wait_for_stream(aclrtStream stream) {
  count(kHostSyncs);
  resolve(stream).wait_idle();
  return kOk;
}

aclError wait_for_device() {
  count(kHostSyncs);
  std::vector<Stream*> streams;
  {
    const std::lock_guard lock(registry().mutex);
    for (const auto& entry : registry().streams) streams.push_back(entry.first);
  }
  for (Stream* const stream : streams) stream->wait_idle();
  return kOk;
}

aclError create_event(aclrtEvent* event) {
  *event = new Event;
  return kOk;
}

}  // namespace

void count(Counter counter) { ++counters[counter]; }

Stream::Stream(std::int32_t id) : id_(id), thread_([this] { run(); }) {}

Stream::~Stream() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  posted_.notify_all();
  thread_.join();
}

void Stream::hold(bool held) {
  const std::lock_guard lock(mutex_);
  held_ = held;
  posted_.notify_one();
}

void Stream::post(std::function<void()> task) {
  count(kTasksPosted);
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  ++pending_;
  posted_.notify_one();
}

void Stream::wait_idle() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return pending_ == 0; });
}

bool Stream::is_idle() {
  const std::lock_guard lock(mutex_);
  return pending_ == 0;
}

void Stream::run() {
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock lock(mutex_);
      posted_.wait(lock, [this] { return stopping_ || (!held_ && !tasks_.empty()); });
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
    count(kTasksDone);
    const std::lock_guard lock(mutex_);
    if (--pending_ == 0) idle_.notify_all();
  }
}

Stream& resolve(aclrtStream stream) {
  if (stream != nullptr) return *static_cast<Stream*>(stream);
  static Stream* const default_stream = registry().create();
  return *default_stream;
}

void Mark::set() {
  const std::lock_guard lock(mutex_);
  set_ = true;
  at_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

void Mark::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return set_; });
}

bool Mark::is_set() {
  const std::lock_guard lock(mutex_);
  return set_;
}

std::chrono::steady_clock::time_point Mark::time() {
  const std::lock_guard lock(mutex_);
  return at_;
}

}  // namespace standin

using standin::Counter;
using standin::kInvalid;
using standin::kOk;
using standin::Mark;

extern "C" {

// For the tests, by ctypes.
long pd_acl_counter(int counter) { return standin::counters[counter]; }
int pd_acl_num_counters() { return standin::kNumCounters; }
void pd_acl_hold(aclrtStream stream, int held) { standin::resolve(stream).hold(held != 0); }

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  *stream = standin::registry().create();
  return kOk;
}
aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }
aclError aclrtDestroyStream(aclrtStream stream) {
  std::unique_ptr<standin::Stream> owned;  // ends outside the lock: its tasks may create streams
  const std::lock_guard lock(standin::registry().mutex);
  const auto found = standin::registry().streams.find(static_cast<standin::Stream*>(stream));
  if (found == standin::registry().streams.end()) return kInvalid;
  owned = std::move(found->second);
  standin::registry().streams.erase(found);
  return kOk;
}
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = standin::resolve(stream).id();
  return kOk;
}
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  *status = standin::resolve(stream).is_idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return kOk;
}
aclError aclrtSynchronizeStream(aclrtStream stream) { return standin::wait_for_stream(stream); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) { return standin::wait_for_stream(stream); }
aclError aclrtSynchronizeDevice() { return standin::wait_for_device(); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return standin::wait_for_device(); }

aclError aclrtCreateEvent(aclrtEvent* event) { return standin::create_event(event); }
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return standin::create_event(event); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return standin::create_event(event); }
aclError aclrtDestroyEvent(aclrtEvent event) {
  delete standin::as_event(event);
  return kOk;
}
aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return kOk; }  // every recording is a mark of its own
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  standin::count(standin::kEventRecords);
  auto mark = std::make_shared<Mark>();
  {
    const std::lock_guard lock(standin::as_event(event)->mutex);
    standin::as_event(event)->last = mark;
  }
  standin::resolve(stream).post([mark] { mark->set(); });
  return kOk;
}
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  standin::count(standin::kEventWaits);
  const auto mark = standin::as_event(event)->latest();
  if (mark) standin::resolve(stream).post([mark] { mark->wait(); });
  return kOk;
}
aclError aclrtSynchronizeEvent(aclrtEvent event) { return standin::wait_for_event(event); }
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t) { return standin::wait_for_event(event); }
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  const auto mark = standin::as_event(event)->latest();
  const bool done = !mark || mark->is_set();
  *status = done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return kOk;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
  const auto mark = standin::as_event(event)->latest();
  *status = !mark || mark->is_set() ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return kOk;
}
aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  const auto first = standin::as_event(start)->latest(), last = standin::as_event(end)->latest();
  if (!first || !last) return kInvalid;
  first->wait();
  last->wait();
  *milliseconds = std::chrono::duration<float, std::milli>(last->time() - first->time()).count();
  return kOk;
}
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* argument) {
  standin::resolve(stream).post([=] { function(argument); });
  return kOk;
}
aclError aclrtLaunchCallback(aclrtCallback function, void* argument, aclrtCallbackBlockType, aclrtStream stream) {
  standin::resolve(stream).post([=] { function(argument); });
  return kOk;
}

}  // extern "C"
