// SPDX-License-Identifier: Apache-2.0
#include "transfer.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <stdexcept>
#include <string>

#include "acl/acl_rt.h"
#include "queue.h"

namespace pd::npu {
namespace {

#ifdef PD_NPU_DEFECTS
unsigned active_defects = 0;
bool has_defect(Defect defect) { return (active_defects & defect) != 0; }
#else
constexpr bool has_defect(Defect) { return false; }
#endif

// Transfers whose event was not yet seen to have passed. Leaked on purpose: at exit the device may still be at work.
struct Unfinished {
  std::mutex mutex;
  std::vector<std::shared_ptr<Event>> events;
};

Unfinished& unfinished() {
  static auto* const instance = new Unfinished;
  return *instance;
}

template <typename Bytes>
Bytes* to_pointer(std::uint64_t address) {
  return reinterpret_cast<Bytes*>(static_cast<std::uintptr_t>(address));
}

// One dimension of a run: `count` pieces. Rows where the runtime has two-dimensional copies, else piece by piece.
struct Pieces {
  std::uint64_t src, dst, bytes, count;
  std::int64_t src_stride, dst_stride;
};

// Errors by which a runtime says that it has no two-dimensional copies between device addresses.
bool is_refusal(int error) {
  return error == ACL_ERROR_INVALID_PARAM || error == ACL_ERROR_RT_PARAM_INVALID ||
         error == ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}

// Posts the copies of one transfer. `has_rows` is shared by the transfers of a group: a refusal is asked for once.
class Copier {
 public:
  Copier(aclrtStream stream, std::atomic<bool>& has_rows) : stream_(stream), has_rows_(has_rows) {}

  int copy(const CopyPlan& plan) const {
    for (const Part& part : plan.parts()) {
      for (std::size_t i = 0; i < part.src_tensors.size(); ++i) {
        for (const Run& run : part.runs) {
          const int error = copy_run(run, part.src_tensors[i], part.dst_tensors[i]);
          if (error != ACL_SUCCESS) return error;
        }
      }
    }
    return ACL_SUCCESS;
  }

 private:
  int copy_piece(std::uint64_t dst, std::uint64_t src, std::uint64_t bytes) const {
    return aclrtMemcpyAsync(to_pointer<void>(dst), bytes, to_pointer<const void>(src), bytes,
                            ACL_MEMCPY_DEVICE_TO_DEVICE, stream_);
  }

  int copy_rows(const Pieces& pieces) const {
    return aclrtMemcpy2dAsync(to_pointer<void>(pieces.dst), static_cast<std::size_t>(pieces.dst_stride),
                              to_pointer<const void>(pieces.src), static_cast<std::size_t>(pieces.src_stride),
                              pieces.bytes, pieces.count, ACL_MEMCPY_DEVICE_TO_DEVICE, stream_);
  }

  int copy_pieces(const Pieces& pieces) const {
    const auto bytes = static_cast<std::int64_t>(pieces.bytes);
    const bool are_rows = pieces.count > 1 && pieces.src_stride >= bytes && pieces.dst_stride >= bytes;
    if (are_rows && has_rows_.load()) {
      const int error = copy_rows(pieces);
      if (!is_refusal(error)) return error;
      has_rows_ = false;
    }
    for (std::uint64_t i = 0; i < pieces.count; ++i) {
      const std::uint64_t src = pieces.src + i * static_cast<std::uint64_t>(pieces.src_stride);
      const std::uint64_t dst = pieces.dst + i * static_cast<std::uint64_t>(pieces.dst_stride);
      if (const int error = copy_piece(dst, src, pieces.bytes); error != ACL_SUCCESS) return error;
    }
    return ACL_SUCCESS;
  }

  // All repetitions of one run between two tensors; the longer dimension becomes the rows of one copy.
  int copy_run(const Run& run, std::uint64_t src_tensor, std::uint64_t dst_tensor) const {
    const std::uint64_t src = src_tensor + run.src_offset, dst = dst_tensor + run.dst_offset;
    const bool inner_rows = run.inner_count >= run.outer_count;
    const std::uint64_t steps = inner_rows ? run.outer_count : run.inner_count;
    const auto src_step = static_cast<std::uint64_t>(inner_rows ? run.outer_src_stride : run.inner_src_stride);
    const auto dst_step = static_cast<std::uint64_t>(inner_rows ? run.outer_dst_stride : run.inner_dst_stride);
    for (std::uint64_t i = 0; i < steps; ++i) {
      const Pieces pieces{src + i * src_step,
                          dst + i * dst_step,
                          run.bytes,
                          inner_rows ? run.inner_count : run.outer_count,
                          inner_rows ? run.inner_src_stride : run.outer_src_stride,
                          inner_rows ? run.inner_dst_stride : run.outer_dst_stride};
      if (const int error = copy_pieces(pieces); error != ACL_SUCCESS) return error;
    }
    return ACL_SUCCESS;
  }

  aclrtStream stream_;
  std::atomic<bool>& has_rows_;
};

struct Launch {
  bool extract, short_pieces;
  KernelArgs args;
  std::uint64_t host_block_ids;
};

int run_kernel(const Kernel& kernel, const Launch& launch, aclrtStream stream) {
  const KernelArgs& args = launch.args;
  const std::size_t bytes = static_cast<std::size_t>(args.num_blocks) * sizeof(std::int32_t);
  const int error =
      aclrtMemcpyAsync(to_pointer<void>(args.block_ids), bytes, to_pointer<const void>(launch.host_block_ids), bytes,
                       ACL_MEMCPY_HOST_TO_DEVICE, stream);
  return error != ACL_SUCCESS ? error : kernel.launch(launch.extract, launch.short_pieces, args, stream);
}

void require_ok(int error, const char* what) {
  if (error != ACL_SUCCESS) throw std::runtime_error(std::string(what) + ": ACL error " + std::to_string(error));
}

}  // namespace

void set_defects(unsigned defects) {
#ifdef PD_NPU_DEFECTS
  active_defects = defects;
#else
  if (defects != 0) throw std::invalid_argument("this build has no defects to switch on");
#endif
}

Event::Event() { require_ok(aclrtCreateEventExWithFlag(&event_, ACL_EVENT_SYNC), "create an event"); }

Event::~Event() {
  if (event_ != nullptr) aclrtDestroyEvent(event_);
}

void Event::report(int error) {
  const std::lock_guard lock(mutex_);
  reported_ = true;
  error_ = error;
  changed_.notify_all();
}

void Event::throw_if_failed() {
  if (error_ != ACL_SUCCESS) throw std::runtime_error("the transfer failed: ACL error " + std::to_string(error_));
}

bool Event::is_over() {
  std::shared_ptr<void> released;  // freed outside the lock
  const std::lock_guard lock(mutex_);
  if (!reported_) return false;
  // Nothing may be freed on a failed submission either before what was posted of it has run: the event still tells.
  aclrtEventRecordedStatus status = ACL_EVENT_RECORDED_STATUS_NOT_READY;
  if (aclrtQueryEventStatus(event_, &status) != ACL_SUCCESS) return false;
  if (status != ACL_EVENT_RECORDED_STATUS_COMPLETE) return false;
  released = std::move(keep_);
  return true;
}

bool Event::query() {
  const bool over = is_over();
  const std::lock_guard lock(mutex_);
  throw_if_failed();
  return over;
}

void Event::synchronize() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return reported_; });
    throw_if_failed();
  }
  require_ok(aclrtSynchronizeEvent(event_), "wait for a transfer");
  is_over();
}

void Event::wait(void* stream) {
  // Behind the transfer's own task in the same queue, so the event is recorded by then.
  enqueue("pd_wait",
          [stream, self = shared_from_this()] { return static_cast<int>(aclrtStreamWaitEvent(stream, self->event_)); });
}

Transfer::Transfer(std::shared_ptr<const Table> table, std::shared_ptr<const Kernel> kernel)
    : table_(std::move(table)),
      kernel_(table_->rows().empty() ? nullptr : std::move(kernel)),
      has_rows_(std::make_shared<std::atomic<bool>>(true)) {}

std::size_t Transfer::collect() {
  std::vector<std::shared_ptr<Event>> candidates;
  {
    const std::lock_guard lock(unfinished().mutex);
    candidates.swap(unfinished().events);
  }
  std::erase_if(candidates, [](const std::shared_ptr<Event>& event) { return event->is_over(); });
  const std::lock_guard lock(unfinished().mutex);
  auto& events = unfinished().events;
  events.insert(events.end(), candidates.begin(), candidates.end());
  return events.size();
}

std::shared_ptr<Event> Transfer::submit(Direction direction, std::span<const std::int64_t> block_ids, Buffers buffers,
                                        void* stream) const {
  table_->check(block_ids, buffers.staging_bytes);
  collect();
  auto event = std::make_shared<Event>();
  if (!has_defect(kNoKeepAlive)) event->keep_ = std::move(buffers.keep);
  std::function<int()> move = [] { return static_cast<int>(ACL_SUCCESS); };
  if (block_ids.empty()) {
    // Only the event.
  } else if (uses_kernel()) {
    Launch launch{direction == Direction::kExtract, table_->has_short_pieces(), {}, buffers.host_block_ids};
    launch.args.rows = buffers.device_rows;
    launch.args.block_ids = buffers.device_block_ids;
    launch.args.staging = buffers.staging;
    launch.args.num_rows = static_cast<std::int32_t>(table_->rows().size());
    launch.args.num_blocks = static_cast<std::int32_t>(block_ids.size());
    move = [kernel = kernel_, launch, stream] { return run_kernel(*kernel, launch, stream); };
  } else {
    auto plan = std::make_shared<const CopyPlan>(table_->plan_copies(direction, block_ids, buffers.staging));
    move = [plan = std::move(plan), has_rows = has_rows_, stream] { return Copier(stream, *has_rows).copy(*plan); };
  }
  const auto task = [event, move = std::move(move), stream] {
    int error = move();
    if (!has_defect(kNoEvent)) {
      const int recorded = aclrtRecordEvent(event->event_, stream);
      error = error != ACL_SUCCESS ? error : recorded;
    }
    if (has_defect(kHostSync)) aclrtSynchronizeStream(stream);
    event->report(error);
    return static_cast<int>(ACL_SUCCESS);  // an error here would end torch_npu's queue, and with it the engine
  };
  {
    const std::lock_guard lock(unfinished().mutex);
    unfinished().events.push_back(event);
  }
  if (has_defect(kOvertakeQueue)) {
    task();
  } else {
    enqueue(direction == Direction::kExtract ? "pd_extract" : "pd_inject", task);
  }
  return event;
}

}  // namespace pd::npu
